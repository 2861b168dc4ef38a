"""Sample Vendor's devices. A real vendor derives from ``TorchAccelerator`` and writes no method at all."""

from accel import AcceleratorError, Capabilities
from accel.backends.cpu import CpuAccelerator, usable_cores
from accel.masks import VisibleDevices


class SampleVendorAccelerator(CpuAccelerator):
    """Pretend cards: places on the host that serve one role at a time, under the vendor's own mask."""

    name = "samplevendor"
    device_type = "cpu"
    visible_devices_env = "SAMPLEVENDOR_VISIBLE_DEVICES"
    ray_resource = "SAMPLEVENDOR"
    ray_noset_env = "RAY_EXPERIMENTAL_NOSET_SAMPLEVENDOR_VISIBLE_DEVICES"
    train_backend = "gloo"
    weight_update_backend = "gloo"
    capabilities = Capabilities(own_generator=False, bf16=True, fp16=True, amp=True, safetensors_device=True)
    priority = 60

    def unavailable_reason(self) -> str | None:
        return None if self.device_count() else f"{self.visible_devices_env}={self.visible_devices()!r} shows no card"

    def device_count(self) -> int:
        cards = [str(number) for number in range(max(2, usable_cores()))]
        listed = VisibleDevices.parse(self.visible_devices_env, self.visible_devices()).ids
        unknown = [card for card in listed or () if card not in cards]
        if unknown:
            raise AcceleratorError(f"{self.visible_devices_env} lists {unknown[0]!r}; cards are {', '.join(cards)}")
        return len(cards if listed is None else listed)

    def device_name(self, index: int) -> str:
        return f"Sample Card {index}"
