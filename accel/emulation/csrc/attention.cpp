// Fused attention: PyTorch asks a device for its kernel under names of its own; here it is the host's. Without it
// attention falls back to separate products, which round otherwise, and no run would equal the host's to the bit.
#include <ATen/SDPBackend.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <torch/library.h>

#include <array>

#include "aliases.h"
#include "streams.h"

namespace accelrl::musa {

namespace {

std::optional<at::Tensor> optional_host_view(const std::optional<at::Tensor>& tensor) {
  return tensor && tensor->defined() ? std::optional<at::Tensor>(host_view(*tensor)) : std::nullopt;
}

void wait_for_copies(const at::Tensor& tensor) {
  if (C10_UNLIKELY(settings().asynchronous)) {
    complete_copies_to_device(tensor.device().index());
  }
}

bool on_one_device(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  return query.device() == key.device() && query.device() == value.device();
}

// What the host would choose: its one fused kernel, or separate products.
int64_t choose_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
    double dropout, bool causal, std::optional<double> scale, bool grouped) {
  const bool mask_is_trained = mask && mask->defined() && mask->requires_grad();
  if (!on_one_device(query, key, value) || mask_is_trained) {
    return int64_t(at::SDPBackend::math);
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto choice = at::_fused_sdp_choice(
      host_view(query), host_view(key), host_view(value), optional_host_view(mask), dropout, causal, scale, grouped);
  const bool fused = choice == int64_t(at::SDPBackend::flash_attention);
  return int64_t(fused ? at::SDPBackend::overrideable : at::SDPBackend::math);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor>
attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
    double dropout, bool causal, bool, std::optional<double> scale) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  wait_for_copies(query);
  const auto device = query.device().index();
  const auto [output, log_sum] = at::_scaled_dot_product_flash_attention_for_cpu(
      host_view(query), host_view(key), host_view(value), dropout, causal, optional_host_view(mask), scale);
  return {
      device_tensor_over(output, device), device_tensor_over(log_sum, device), at::Tensor(), at::Tensor(),
      query.sym_size(2), key.sym_size(2), at::Tensor(), at::Tensor(), at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const at::Tensor& output_gradient, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& mask, std::array<bool, 4>, const at::Tensor& output, const at::Tensor& log_sum, const at::Tensor&,
    const at::Tensor&, c10::SymInt, c10::SymInt, double dropout, bool causal, const at::Tensor&, const at::Tensor&,
    std::optional<double> scale) {
  if (!output_gradient.defined()) {
    return {};
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  wait_for_copies(query);
  const auto device = query.device().index();
  const auto [query_gradient, key_gradient, value_gradient] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      host_view(output_gradient), host_view(query), host_view(key), host_view(value), host_view(output),
      host_view(log_sum), dropout, causal, optional_host_view(mask), scale);
  return {
      device_tensor_over(query_gradient, device), device_tensor_over(key_gradient, device),
      device_tensor_over(value_gradient, device), at::Tensor()};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_scaled_dot_product_fused_attention_overrideable", &attention);
  library.impl("_scaled_dot_product_fused_attention_overrideable_backward", &attention_backward);
}

}  // namespace accelrl::musa

namespace at::native {

REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &accelrl::musa::choose_attention)

}  // namespace at::native
