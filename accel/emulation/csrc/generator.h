// Random numbers: each device has a generator of its own, which draws with the host's algorithm from its own state.
#pragma once

#include <ATen/core/Generator.h>

#include "devices.h"

namespace accelrl::musa {

const at::Generator& default_generator(DeviceIndex device);
at::Generator new_generator(DeviceIndex device);
// The host generator inside, which host kernels draw from.
at::Generator host_generator(const at::Generator& generator);

}  // namespace accelrl::musa
