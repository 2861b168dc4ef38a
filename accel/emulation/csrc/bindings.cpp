// What the Python side (accel/emulation/torch_musa) calls.
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include "aliases.h"
#include "collectives.h"
#include "devices.h"
#include "generator.h"
#include "hooks.h"
#include "kernels.h"
#include "memory.h"

namespace py = pybind11;
using namespace accelrl::musa;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("start", [](int devices, int64_t bytes_per_device, bool asynchronous) {
    configure({DeviceIndex(devices), bytes_per_device, asynchronous});
    register_hooks();
    return register_kernels();
  });
  module.def("device_count", [] { return int(settings().device_count); });
  module.def("asynchronous", [] { return settings().asynchronous; });
  module.def("in_bad_fork", &in_bad_fork);
  module.def("current_device", [] { return int(current_device()); });
  module.def("set_device", [](int device) { set_current_device(DeviceIndex(device)); });
  module.def("exchange_device", [](int device) {
    return int(device < 0 ? current_device() : exchange_device(DeviceIndex(device)));
  });
  module.def("memory_counts", [](int device) {
    const auto counts = memory_counts(DeviceIndex(device));
    return std::make_tuple(counts.allocated, counts.peak, counts.allocations, counts.frees, counts.failures,
                           counts.outside);
  });
  module.def("reset_peak", [](int device) { reset_peak(DeviceIndex(device)); });
  module.def("capacity", [] { return settings().bytes_per_device; });
  module.def("set_capacity", &set_bytes_per_device);
  module.def("default_generator", [](int device) { return default_generator(DeviceIndex(device)); });
  module.def("make_mccl", [](py::object carrier, int rank, int size, double timeout_seconds) {
    const auto timeout = std::chrono::milliseconds(int64_t(timeout_seconds * 1000));
    return make_mccl(carrier.cast<c10::intrusive_ptr<c10d::Backend>>(), rank, size, timeout);
  });
}
