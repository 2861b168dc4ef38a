"""What happens to requests under way while an engine gets new weights."""

from enum import StrEnum


class PauseMode(StrEnum):
    """``--pause-generation-mode``; requests that have no token yet wait in every mode, and are of the new weights."""

    ABORT = "abort"  # they are answered with what they have
    RETRACT = "retract"  # they keep their tokens; keys and values are computed anew under the new weights
    IN_PLACE = "in_place"  # they keep keys and values too, which older weights made
