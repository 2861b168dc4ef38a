#include "streams.h"

#include <ATen/ops/bitwise_not.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace accelrl::musa {

namespace {

struct PendingCopy {
  at::Tensor destination;  // both are host aliases that keep their memory alive
  at::Tensor source;
  bool to_device;
  bool done = false;
};

using Copies = std::vector<std::shared_ptr<PendingCopy>>;

struct Event {
  std::chrono::steady_clock::time_point at;
  Copies behind;  // pending on the stream when the event was recorded
};

// One lock for all lists: copies complete inside it, and run on host tensors, which never come back here.
std::mutex& mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

std::map<std::pair<DeviceIndex, c10::StreamId>, Copies>& pending() {
  static auto* pending = new std::map<std::pair<DeviceIndex, c10::StreamId>, Copies>;
  return *pending;
}

std::atomic<c10::StreamId> last_stream_id{0};
thread_local std::array<c10::StreamId, kMaxDevices> this_threads_streams{};

Copies& copies_of(const c10::Stream& stream) {
  return pending()[{stream.device_index(), stream.id()}];
}

void complete(PendingCopy& copy) {
  if (copy.done) {
    return;
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  copy.destination.copy_(copy.source);
  copy.done = true;
  copy.destination.reset();
  copy.source.reset();
}

void complete_to_device(const Copies& copies) {
  for (const auto& copy : copies) {
    if (copy->to_device) {
      complete(*copy);
    }
  }
}

void complete_all(const Copies& copies) {
  for (const auto& copy : copies) {
    complete(*copy);
  }
}

bool all_done(const Copies& copies) {
  return std::all_of(copies.begin(), copies.end(), [](const auto& copy) { return copy->done; });
}

void forget_done(Copies& copies) {
  copies.erase(
      std::remove_if(copies.begin(), copies.end(), [](const auto& copy) { return copy->done; }), copies.end());
}

// The first answer about unfinished work is no; asking took long enough for it to finish.
bool query(const Copies& copies) {
  if (all_done(copies)) {
    return true;
  }
  complete_all(copies);
  return false;
}

void poison(const at::Tensor& destination, const at::Tensor& source) {
  if (c10::isFloatingType(destination.scalar_type()) || c10::isComplexType(destination.scalar_type())) {
    destination.fill_(std::numeric_limits<double>::quiet_NaN());
  } else if (c10::isIntegralType(source.scalar_type(), /*includeBool=*/true)) {
    destination.copy_(at::bitwise_not(source));  // differs from every right value
  } else {
    destination.fill_(1);
  }
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override {
    return kMusa;
  }
  Device exchangeDevice(Device device) const override {
    return Device(kMusa, exchange_device(device.index()));
  }
  Device getDevice() const override {
    return Device(kMusa, current_device());
  }
  void setDevice(Device device) const override {
    set_current_device(device.index());
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    exchange_device_if_valid(device.index());
  }
  DeviceIndex deviceCount() const noexcept override {
    return settings().device_count;
  }
  c10::DeviceCapability getDeviceCapability(Device) const override {
    return c10::DeviceCapability();
  }

  c10::Stream getStream(Device device) const override {
    return current_stream(device.index());
  }
  c10::Stream getDefaultStream(Device device) const override {
    return stream(device.index(), 0);
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override {
    return stream(device.index(), ++last_stream_id);
  }
  c10::Stream getNewStream(Device device, int) const override {
    return stream(device.index(), ++last_stream_id);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const auto before = current_stream(next.device_index());
    this_threads_streams[next.device_index()] = next.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(static_cast<intptr_t>(stream.id()));
  }
  bool queryStream(const c10::Stream& stream) const override {
    std::lock_guard<std::mutex> lock(mutex());
    auto& copies = copies_of(stream);
    const bool done = query(copies);
    copies.clear();
    return done;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize_stream(stream);
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    synchronize_device(or_current(device));
  }

  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event;
    }
    std::lock_guard<std::mutex> lock(mutex());
    auto& recorded = *static_cast<Event*>(*event);
    recorded.at = std::chrono::steady_clock::now();
    recorded.behind = copies_of(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) {
      return;
    }
    std::lock_guard<std::mutex> lock(mutex());
    const auto& behind = static_cast<Event*>(event)->behind;
    complete_to_device(behind);
    auto& copies = copies_of(stream);
    copies.insert(copies.end(), behind.begin(), behind.end());
    forget_done(copies);
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) {
      return true;
    }
    std::lock_guard<std::mutex> lock(mutex());
    return query(static_cast<Event*>(event)->behind);
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) {
      return;
    }
    std::lock_guard<std::mutex> lock(mutex());
    complete_all(static_cast<Event*>(event)->behind);
  }
  double elapsedTime(void* begin, void* end, const DeviceIndex) const override {
    TORCH_CHECK(begin != nullptr && end != nullptr, "Both events must be recorded before calculating elapsed time.");
    const auto passed = static_cast<Event*>(end)->at - static_cast<Event*>(begin)->at;
    return std::chrono::duration<double, std::milli>(passed).count();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }

 private:
  static c10::Stream stream(DeviceIndex device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, Device(kMusa, or_current(device)), id);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace

c10::Stream current_stream(DeviceIndex device) {
  const auto index = or_current(device);
  return c10::Stream(c10::Stream::UNSAFE, Device(kMusa, index), this_threads_streams[index]);
}

void defer_copy(
    const at::Tensor& destination, const at::Tensor& source, c10::ArrayRef<DeviceIndex> devices, bool to_device,
    bool source_stays) {
  std::lock_guard<std::mutex> lock(mutex());
  for (const auto device : devices) {
    complete_to_device(copies_of(current_stream(device)));
  }
  auto values = source_stays ? source : source.clone();
  poison(destination, source);
  const auto copy = std::make_shared<PendingCopy>(PendingCopy{destination, std::move(values), to_device});
  for (const auto device : devices) {
    copies_of(current_stream(device)).push_back(copy);
  }
}

void complete_copies_to_device(DeviceIndex device) {
  std::lock_guard<std::mutex> lock(mutex());
  auto& copies = copies_of(current_stream(device));
  complete_to_device(copies);
  forget_done(copies);
}

void synchronize_stream(const c10::Stream& stream) {
  std::lock_guard<std::mutex> lock(mutex());
  auto& copies = copies_of(stream);
  complete_all(copies);
  copies.clear();
}

void synchronize_device(DeviceIndex device) {
  std::lock_guard<std::mutex> lock(mutex());
  for (auto& [key, copies] : pending()) {
    if (key.first == device) {
      complete_all(copies);
      copies.clear();
    }
  }
}

}  // namespace accelrl::musa
