#pragma once

namespace accelrl::musa {

// Tells PyTorch about the device; once in a process.
void register_hooks();

}  // namespace accelrl::musa
