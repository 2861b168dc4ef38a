// Operators: one boxed kernel runs the host's on aliases (aliases.h); a few have kernels of their own.
#pragma once

#include <cstdint>

namespace accelrl::musa {

// Registers the boxed kernel for every operator with a host kernel of its own; returns how many. Once in a process.
int64_t register_kernels();

}  // namespace accelrl::musa
