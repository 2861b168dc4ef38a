// The process-group backend "mccl": collectives of device tensors, carried by gloo on host aliases of their memory.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace accelrl::musa {

// A backend that refuses tensors of other devices, as mccl does, and hands the rest to `carrier`.
c10::intrusive_ptr<c10d::Backend> make_mccl(
    c10::intrusive_ptr<c10d::Backend> carrier, int rank, int size, std::chrono::milliseconds timeout);

}  // namespace accelrl::musa
