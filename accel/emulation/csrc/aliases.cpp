#include "aliases.h"

#include <c10/core/CPUAllocator.h>

#include "memory.h"

namespace accelrl::musa {

namespace {

c10::Storage host_storage(const c10::Storage& storage, at::DataPtr data) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(),
      /*resizable=*/true));
}

c10::Storage borrowed_host_storage(const c10::Storage& storage) {
  return host_storage(storage, at::DataPtr(storage.mutable_data(), Device(kHost)));
}

void release_storage(void* context) {
  delete static_cast<c10::Storage*>(context);
}

c10::Storage owning_host_storage(const c10::Storage& storage) {
  return host_storage(
      storage, at::DataPtr(storage.mutable_data(), new c10::Storage(storage), &release_storage, Device(kHost)));
}

// A tensor of another backend with the same geometry, type and lazy bits.
at::Tensor same_tensor_over(const at::Tensor& tensor, c10::Storage storage, c10::DispatchKey backend) {
  const auto* original = tensor.unsafeGetTensorImpl();
  const auto lazy = original->key_set() &
      c10::DispatchKeySet({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor});
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(backend) | lazy, original->dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(original->sizes(), original->strides(), original->storage_offset());
  if (original->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  return result;
}

}  // namespace

at::Tensor host_view(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) {
    return tensor;
  }
  return same_tensor_over(tensor, owning_host_storage(tensor.storage()), c10::DispatchKey::CPU);
}

at::Tensor device_tensor_over(const at::Tensor& host, DeviceIndex device) {
  return same_tensor_over(host, device_storage_over(host.storage(), device), c10::DispatchKey::PrivateUse1);
}

at::Tensor CallAliases::to_host(const at::Tensor& tensor, bool may_be_written) {
  if (!tensor.defined() || !tensor.is_privateuseone()) {
    return tensor;
  }
  for (auto& pair : tensors_) {
    if (pair.device.is_same(tensor)) {
      pair.may_be_written |= may_be_written;
      return pair.host;
    }
  }
  auto host = same_tensor_over(tensor, to_host(tensor.storage()), c10::DispatchKey::CPU);
  tensors_.push_back({tensor, host, may_be_written});
  return host;
}

c10::Storage CallAliases::to_host(const c10::Storage& storage) {
  for (const auto& pair : storages_) {
    if (pair.device.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) {
      return pair.host;
    }
  }
  storages_.push_back({storage, borrowed_host_storage(storage)});
  return storages_.back().host;
}

c10::Storage CallAliases::to_device(const c10::Storage& host, DeviceIndex device) {
  for (const auto& pair : storages_) {
    if (pair.host.unsafeGetStorageImpl() == host.unsafeGetStorageImpl()) {
      return pair.device;
    }
  }
  storages_.push_back({device_storage_over(host, device), host});
  return storages_.back().device;
}

at::Tensor CallAliases::to_device(const at::Tensor& host, DeviceIndex device) {
  if (!host.defined()) {
    return host;
  }
  for (const auto& pair : tensors_) {
    if (pair.host.is_same(host)) {
      return pair.device;
    }
  }
  TORCH_CHECK(
      host.layout() == c10::Layout::Strided && host.has_storage(),
      "the emulated MUSA device holds dense tensors only, and an operator returned a ", host.layout(), " one");
  return same_tensor_over(host, to_device(host.storage(), device), c10::DispatchKey::PrivateUse1);
}

void CallAliases::commit() {
  for (size_t i = 0; i < storages_.size(); ++i) {
    auto* device = storages_[i].device.unsafeGetStorageImpl();
    auto* host = storages_[i].host.unsafeGetStorageImpl();
    if (C10_UNLIKELY(device->data() != host->data())) {  // the kernel resized it
      const auto index = device->device().index();
      device->set_data_ptr_noswap(adopt_host_storage(storages_[i].host, index));
      device->set_nbytes(host->nbytes());
    }
  }
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (!tensors_[i].may_be_written) {
      continue;
    }
    auto* device = tensors_[i].device.unsafeGetTensorImpl();
    const auto* host = tensors_[i].host.unsafeGetTensorImpl();
    const auto storage = to_device(host->storage(), tensors_[i].device.device().index());
    if (storage.unsafeGetStorageImpl() != device->storage().unsafeGetStorageImpl()) {  // set_()
      device->set_storage_keep_dtype(storage);
    }
    if (device->sizes() != host->sizes() || device->strides() != host->strides() ||
        device->storage_offset() != host->storage_offset()) {
      device->set_sizes_and_strides(host->sizes(), host->strides(), host->storage_offset());
    }
  }
}

}  // namespace accelrl::musa
