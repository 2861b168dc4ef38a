// What PyTorch asks a PrivateUse1 backend about devices, generators, pinned memory and storages.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstring>

#include "devices.h"
#include "generator.h"
#include "hooks.h"
#include "memory.h"

namespace accelrl::musa {

namespace {

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  void init() const override {}
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return settings().device_count > 0;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return settings().device_count;
  }
  void setCurrentDevice(DeviceIndex device) const override {
    set_current_device(device);
  }
  DeviceIndex getCurrentDevice() const override {
    return current_device();
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return exchange_device(device);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchange_device_if_valid(device);
  }
  bool isPinnedPtr(const void* pointer) const override {
    return is_pinned(pointer);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  Device getDeviceFromPtr(void*) const override {
    return Device(kMusa, current_device());
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return new_generator(device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DeviceGuard on_its_device(storage.device());
    auto resized = device_allocator()->allocate(bytes);
    if (bytes != 0 && storage.data() != nullptr) {
      std::memcpy(resized.get(), storage.data(), std::min(bytes, storage.nbytes()));
    }
    auto* impl = storage.unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(std::move(resized));
    impl->set_nbytes(bytes);
  }
};

}  // namespace

void register_hooks() {
  c10::SetAllocator(kMusa, device_allocator(), /*priority=*/1);
  at::RegisterPrivateUse1HooksInterface(new Hooks());
}

}  // namespace accelrl::musa
