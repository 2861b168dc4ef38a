// How many emulated devices there are, which one is current, and what was asked for when the process began.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>

namespace accelrl::musa {

using c10::Device;
using c10::DeviceIndex;

// PyTorch's free slot for a device type; torch_musa renames it "musa", and so do we.
constexpr auto kMusa = c10::DeviceType::PrivateUse1;
constexpr auto kHost = c10::DeviceType::CPU;
constexpr int kMaxDevices = 16;

struct Settings {
  DeviceIndex device_count = 0;
  int64_t bytes_per_device = 0;
  bool asynchronous = false;  // copies with non_blocking complete late: see streams.h
};

const Settings& settings();
void configure(const Settings& settings);
void set_bytes_per_device(int64_t bytes);

DeviceIndex current_device();
// Throws the error of an invalid ordinal, and in a forked child the one that asks for spawn.
void set_current_device(DeviceIndex device);
DeviceIndex exchange_device(DeviceIndex device);
// For guards that must not throw: an invalid index is left out.
DeviceIndex exchange_device_if_valid(DeviceIndex device) noexcept;

// The index, or the current device for -1 ("musa" without a number).
inline DeviceIndex or_current(DeviceIndex device) {
  return device < 0 ? current_device() : device;
}

// The driver does not survive fork(): a child of a process that used a device may not use one.
void mark_used();
bool in_bad_fork();

}  // namespace accelrl::musa
