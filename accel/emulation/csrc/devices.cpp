#include "devices.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <atomic>

namespace accelrl::musa {

namespace {

Settings current_settings;
thread_local DeviceIndex this_threads_device = 0;
std::atomic<bool> used{false};
std::atomic<bool> forked_after_use{false};

void after_fork_in_child() {
  forked_after_use = used.load();
}

void check_fork() {
  TORCH_CHECK(
      !in_bad_fork(),
      "Cannot re-initialize MUSA in forked subprocess. To use MUSA with multiprocessing, you must use the 'spawn' start "
      "method");
}

}  // namespace

const Settings& settings() {
  return current_settings;
}

void configure(const Settings& settings) {
  TORCH_CHECK(
      settings.device_count >= 0 && settings.device_count <= kMaxDevices,
      "the emulation has 0 to ", kMaxDevices, " devices, not ", int(settings.device_count));
  current_settings = settings;
  pthread_atfork(nullptr, nullptr, &after_fork_in_child);
}

void set_bytes_per_device(int64_t bytes) {
  current_settings.bytes_per_device = bytes;
}

DeviceIndex current_device() {
  return this_threads_device;
}

void set_current_device(DeviceIndex device) {
  mark_used();
  TORCH_CHECK(
      device >= 0 && device < current_settings.device_count,
      "MUSA error: invalid device ordinal ", int(device), " (", int(current_settings.device_count), " visible)");
  this_threads_device = device;
}

DeviceIndex exchange_device(DeviceIndex device) {
  const auto before = this_threads_device;
  if (device != before) {
    set_current_device(device);
  }
  return before;
}

DeviceIndex exchange_device_if_valid(DeviceIndex device) noexcept {
  const auto before = this_threads_device;
  if (device >= 0 && device < current_settings.device_count) {
    this_threads_device = device;
  }
  return before;
}

void mark_used() {
  if (C10_UNLIKELY(!used.load(std::memory_order_relaxed))) {
    used = true;
  }
  check_fork();
}

bool in_bad_fork() {
  return forked_after_use.load(std::memory_order_relaxed);
}

}  // namespace accelrl::musa
