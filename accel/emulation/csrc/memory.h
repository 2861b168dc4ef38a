// Device memory is host memory with a budget for each device; pinned memory is host memory that is remembered.
//
// There is no cache of freed blocks: reserved equals allocated, and empty_cache has nothing to give back. The real
// allocator keeps blocks, so code that relies on reserved > allocated sees the difference here.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

#include "devices.h"

namespace accelrl::musa {

struct MemoryCounts {
  int64_t allocated = 0;
  int64_t peak = 0;
  int64_t allocations = 0;
  int64_t frees = 0;
  int64_t failures = 0;
  int64_t outside = 0;
};

MemoryCounts memory_counts(DeviceIndex device);
void reset_peak(DeviceIndex device);

// Memory that a library takes from the device past the allocator, as collectives do: free memory shows it, allocated
// memory does not. Given back by a negative number.
void take_outside(DeviceIndex device, int64_t bytes);

c10::DeviceAllocator* device_allocator();
at::HostAllocator* pinned_allocator();
bool is_pinned(const void* pointer);

// Counts a host storage as memory of a device without copying it; the storage lives as long as the result.
at::DataPtr adopt_host_storage(c10::Storage host, DeviceIndex device);
// The same as a storage of the device.
c10::Storage device_storage_over(c10::Storage host, DeviceIndex device);

}  // namespace accelrl::musa
