#include "kernels.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <array>
#include <string>
#include <unordered_set>

#include "aliases.h"
#include "generator.h"
#include "memory.h"
#include "streams.h"

namespace accelrl::musa {

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

// Operators whose tensors may be on two devices, as CUDA's may: indices on the host, copies, set_.
bool may_cross_devices(const c10::OperatorName& name) {
  static const auto* names = new std::unordered_set<std::string>{
      "aten::_copy_from",       "aten::_copy_from_and_resize", "aten::index",        "aten::index_put_",
      "aten::_index_put_impl_", "aten::_unsafe_index",         "aten::set_",
      "aten::_amp_foreach_non_finite_check_and_unscale_"};
  return names->count(name.name) > 0;
}

// Operators that make the host wait for the device's stream, because their result decides what the host does next.
bool waits_for_stream(const c10::OperatorName& name) {
  static const auto* names = new std::unordered_set<std::string>{
      "aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select",
      "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive"};
  return names->count(name.name) > 0;
}

// One call of the boxed kernel: arguments to the host, the host's kernel, results back.
class BoxedCall {
 public:
  BoxedCall(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), stack_(stack) {}

  void run() {
    const auto& arguments = op_.schema().arguments();
    const size_t first = stack_->size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); ++i) {
      argument_to_host((*stack_)[first + i], arguments[i]);
    }
    const auto device = device_ < 0 ? current_device() : device_;
    check_devices(device);
    if (no_generator_given_ != nullptr) {  // else the kernel would draw from the host's
      *no_generator_given_ = host_generator(default_generator(device));
    }
    if (C10_UNLIKELY(settings().asynchronous)) {
      wait_for_copies(device);
    }
    {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      op_.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack_);
    }
    aliases_.commit();
    if (to_host_) {
      return;
    }
    const size_t results = op_.schema().returns().size();
    for (size_t i = stack_->size() - results; i < stack_->size(); ++i) {
      result_to_device((*stack_)[i], device);
    }
  }

 private:
  void argument_to_host(c10::IValue& value, const c10::Argument& argument) {
    const auto* alias = argument.alias_info();
    const bool written = alias != nullptr && alias->isWrite();
    if (value.isTensor()) {
      value = tensor_to_host(value.toTensor(), written);
    } else if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      for (auto& tensor : tensors) {
        tensor = tensor_to_host(tensor, written);
      }
      value = std::move(tensors);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> tensors;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        tensors.push_back(tensor ? std::optional<at::Tensor>(tensor_to_host(*tensor, false)) : std::nullopt);
      }
      value = std::move(tensors);
    } else if (value.isDevice()) {
      const auto device = value.toDevice();
      to_host_ = device.type() == kHost;
      if (device.type() == kMusa) {
        device_ = or_current(device.index());
        value = Device(kHost);
      }
    } else if (value.isStorage()) {
      const auto storage = value.toStorage();
      if (storage.device_type() == kMusa) {
        device_ = device_ < 0 ? storage.device().index() : device_;
        value = aliases_.to_host(storage);
      }
    } else if (value.isGenerator()) {
      const auto generator = value.toGenerator();
      TORCH_CHECK(
          generator.device().type() == kMusa, "Expected a 'musa' device type for generator but found '",
          generator.device().type(), "'");
      value = host_generator(generator);
    } else if (value.isNone() && argument.name() == "generator") {
      no_generator_given_ = &value;
    }
  }

  at::Tensor tensor_to_host(const at::Tensor& tensor, bool written) {
    if (!tensor.defined()) {
      return tensor;
    }
    if (!tensor.is_privateuseone()) {
      // A tensor of no dimension is a number, which any device takes from the host.
      has_host_tensor_ |= tensor.device().type() == kHost && tensor.dim() > 0;
      return tensor;
    }
    const auto index = tensor.device().index();
    if (!has_device_tensor_ && device_ < 0) {
      device_ = index;
    }
    has_two_devices_ |= has_device_tensor_ && index != first_tensors_device_;
    first_tensors_device_ = has_device_tensor_ ? first_tensors_device_ : index;
    has_device_tensor_ = true;
    return aliases_.to_host(tensor, written);
  }

  void check_devices(DeviceIndex device) const {
    const bool mixed = has_two_devices_ || (has_host_tensor_ && has_device_tensor_);
    TORCH_CHECK(
        C10_LIKELY(!mixed) || may_cross_devices(op_.operator_name()),
        "Expected all tensors to be on the same device, but found at least two devices, musa:", int(device), " and ",
        has_two_devices_ ? "another musa device" : "cpu", "! (when calling ", op_.operator_name(), ")");
  }

  void wait_for_copies(DeviceIndex device) const {
    if (waits_for_stream(op_.operator_name())) {
      synchronize_stream(current_stream(device));
    } else {
      complete_copies_to_device(device);
    }
  }

  void result_to_device(c10::IValue& value, DeviceIndex device) {
    if (value.isTensor()) {
      value = aliases_.to_device(value.toTensor(), device);
    } else if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      for (auto& tensor : tensors) {
        tensor = aliases_.to_device(tensor, device);
      }
      value = std::move(tensors);
    }
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  CallAliases aliases_;
  c10::IValue* no_generator_given_ = nullptr;
  DeviceIndex device_ = -1;  // where new memory belongs: a device argument's, else the first tensor's
  DeviceIndex first_tensors_device_ = -1;
  bool has_device_tensor_ = false;
  bool has_two_devices_ = false;
  bool has_host_tensor_ = false;
  bool to_host_ = false;
};

void run_on_host(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  BoxedCall(op, stack).run();
}

// Copies

at::Tensor& copy(at::Tensor& destination, const at::Tensor& source, bool non_blocking) {
  const bool to_device = destination.is_privateuseone();
  const bool from_device = source.is_privateuseone();
  const auto device = (to_device ? destination : source).device().index();
  const bool crosses = to_device != from_device;
  const bool between_devices = !crosses && source.device() != destination.device();
  if (C10_UNLIKELY(settings().asynchronous)) {
    if ((crosses || between_devices) && non_blocking && source.numel() > 0) {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      // A pinned source is read by the device when it comes to it; a pageable one is staged before the call returns.
      const bool source_stays = between_devices || (to_device && is_pinned(source.const_data_ptr()));
      const std::array<DeviceIndex, 2> devices{device, source.device().index()};
      const auto ordered_on = c10::ArrayRef<DeviceIndex>(devices).slice(0, between_devices ? 2 : 1);
      defer_copy(host_view(destination), host_view(source), ordered_on, to_device, source_stays);
      return destination;
    }
    if (crosses) {
      synchronize_stream(current_stream(device));
    } else {
      complete_copies_to_device(source.device().index());
      complete_copies_to_device(device);
    }
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  CallAliases aliases;
  aliases.to_host(destination, true).copy_(aliases.to_host(source, false));
  return destination;
}

void foreach_copy(at::TensorList destinations, at::TensorList sources, bool non_blocking) {
  TORCH_CHECK(destinations.size() == sources.size(), "_foreach_copy_: the lists differ in length");
  for (size_t i = 0; i < destinations.size(); ++i) {
    auto destination = destinations[i];
    copy(destination, sources[i], non_blocking);
  }
}

// Factories and views: the memory is the device's, so these never see the host.

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard on_device(device);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), device_allocator(), DispatchKeySet(DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device> device, std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard on_device(device);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), device_allocator(),
      DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// Zeros without memory, which gradients are made of where they vanish; the key makes others write them out first.
at::Tensor efficient_zero_tensor(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>) {
  const auto index = device && device->has_index() ? device->index() : current_device();
  at::native::ZeroTensorAllocator allocator(Device(kMusa, index));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &allocator, DispatchKeySet({DispatchKey::PrivateUse1, DispatchKey::ZeroTensor}),
      c10::dtype_or_default(dtype), std::nullopt);
}

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

// A pending copy holds its memory itself.
void record_stream(at::Tensor&, c10::Stream) {}

// The host's kernel takes no generator and would draw from the host's: drawn here from the device's.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || input.numel() == 0) {
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  }
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0 : 1.0 / (1 - p)), mask};
}

// CUDA and MUSA count integers too, and libraries rely on it (routing of experts); the host's kernel takes floats only.
at::Tensor histc(const at::Tensor& input, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto device = input.device().index();
  complete_copies_to_device(device);
  const auto host = host_view(input);
  const bool integral = c10::isIntegralType(input.scalar_type(), /*includeBool=*/false);
  const auto counts = at::histc(integral ? host.to(at::kDouble) : host, bins, low, high);
  return device_tensor_over(counts.to(input.scalar_type()), device);
}

// For a device that PyTorch does not know, `convolution` comes out at these names, which have no host kernel.

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
    c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto device = input.device().index();
  complete_copies_to_device(device);
  const auto host_bias = bias ? std::optional<at::Tensor>(host_view(*bias)) : std::nullopt;
  auto result = at::convolution_symint(
      host_view(input), host_view(weight), host_bias, stride, padding, dilation, transposed, output_padding, groups);
  return device_tensor_over(result.contiguous(), device);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& output_gradient, const at::Tensor& input, const at::Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> wanted) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto device = input.device().index();
  complete_copies_to_device(device);
  const std::array<c10::SymInt, 1> bias_size{
      transposed ? weight.sym_size(1) * groups : weight.sym_size(0)};
  const auto [input_gradient, weight_gradient, bias_gradient] = at::convolution_backward_symint(
      host_view(output_gradient), host_view(input), host_view(weight), c10::SymIntArrayRef(bias_size), stride, padding,
      dilation, transposed, output_padding, groups, wanted);
  const auto back = [device](const at::Tensor& host) {
    return host.defined() ? device_tensor_over(host.contiguous(), device) : host;
  };
  return {back(input_gradient), back(weight_gradient), back(bias_gradient)};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("copy_", &copy);
  library.impl("_foreach_copy_", &foreach_copy);
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_efficientzerotensor", &efficient_zero_tensor);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("record_stream", &record_stream);
  library.impl("native_dropout", &native_dropout);
  library.impl("histc", &histc);
  library.impl("convolution_overrideable", &convolution);
  library.impl("convolution_backward_overrideable", &convolution_backward);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

int64_t register_kernels() {
  // The fallback above would do for operators without any kernel; but many with a host kernel also have a composite one,
  // which PyTorch prefers to a fallback. Never destroyed: the dispatcher outlives us.
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  const std::string aten = "aten::";
  int64_t count = 0;
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind(aten, 0) != 0) {
      continue;
    }
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || op->hasKernelForDispatchKey(DispatchKey::PrivateUse1)) {
      continue;
    }
    // The _foreach_ operators' composites loop over tensors, one boxed call each: one call for all is faster.
    const bool foreach = name.name.rfind("aten::_foreach_", 0) == 0;
    if (!foreach && !op->hasKernelForDispatchKey(DispatchKey::CPU)) {
      continue;
    }
    const auto overload = name.overload_name.empty() ? "" : "." + name.overload_name;
    library->impl(
        (name.name.substr(aten.size()) + overload).c_str(),
        torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
    ++count;
  }
  return count;
}

}  // namespace accelrl::musa
