"""``torch_musa.core.stream``."""

from torch_musa.streams import Event as Event
from torch_musa.streams import Stream as Stream
from torch_musa.streams import StreamContext as StreamContext
from torch_musa.streams import current_stream as current_stream
from torch_musa.streams import default_stream as default_stream
from torch_musa.streams import set_stream as set_stream
from torch_musa.streams import stream as stream
