// Host tensors over device memory, and device tensors over host memory, without a copy.
//
// Device memory is host memory, so a host kernel can work on a device tensor's bytes. What must not get lost on the way
// is identity: which tensors are the same, which share a storage, and which bits are lazy.
//
//   Aliasing. Within one call, each device storage has exactly one host storage, so two arguments that overlap also
//   overlap as the host kernel sees them (its checks for overlapping writes work), and an argument that is given twice
//   is one tensor twice.
//   In place and out=. A kernel that returns one of its arguments returns a host alias; the caller gets the device tensor
//   that the alias stands for, not a new one. Where the kernel resized the storage or changed sizes and strides of a
//   tensor that it may write (`resize_`, `set_`, out=), the change is carried over to the device tensor.
//   Views. A returned tensor over an argument's storage becomes a device tensor over that argument's storage. Any other
//   storage is adopted: it becomes device memory where it lies.
//   Lazy conjugation and negation. Those are bits in a tensor's key set, and its bytes hold the value before them. Host
//   aliases and returned tensors carry the bits along; without that, a product with x.conj() silently uses x. The same
//   goes for the key of zeros that have no memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "devices.h"

namespace accelrl::musa {

// A host tensor over a device tensor's memory that keeps it alive; other tensors are returned as they are.
at::Tensor host_view(const at::Tensor& tensor);
// A device tensor over a host tensor's memory that keeps it alive.
at::Tensor device_tensor_over(const at::Tensor& host, DeviceIndex device);

// The aliases of one call. They borrow the memory: none may outlive the call.
class CallAliases {
 public:
  at::Tensor to_host(const at::Tensor& tensor, bool may_be_written);
  c10::Storage to_host(const c10::Storage& storage);
  // For what the kernel returned; `device` is where new memory belongs.
  at::Tensor to_device(const at::Tensor& host, DeviceIndex device);
  // Carries over what the kernel changed about its arguments.
  void commit();

 private:
  struct TensorPair {
    at::Tensor device;
    at::Tensor host;
    bool may_be_written;
  };
  struct StoragePair {
    c10::Storage device;
    c10::Storage host;
  };

  c10::Storage to_device(const c10::Storage& host, DeviceIndex device);

  c10::SmallVector<TensorPair, 8> tensors_;
  c10::SmallVector<StoragePair, 8> storages_;
};

}  // namespace accelrl::musa
