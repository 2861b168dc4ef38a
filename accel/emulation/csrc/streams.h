// Streams, events and, with ACCELRL_EMULATE_ASYNC=1, copies that complete as late as hardware may complete them.
//
// Kernels run on the host when they are called, in the order of the program. What can come late is a copy with
// non_blocking=True between host and device, or between two devices. Such a copy fills its destination with poison (NaN;
// for integers the complement of the value) and joins its stream's list of pending copies:
//
//   - To the device: a kernel called on the same stream is ordered behind the copy, so it completes the copy first, from
//     the source as it is then. (A pinned source that was overwritten meanwhile gives the overwritten values, as on
//     hardware; pageable memory is staged when the copy is called.) A kernel on another stream sees poison unless that
//     stream waited for the copy's stream or event.
//   - To another device: the same, on the current streams of both devices: either may go on with a kernel, which is
//     ordered behind the copy, and any other stream has to wait for one of them.
//   - To the host: the values are those at the time of the call, and the host sees poison until it synchronises with the
//     stream, its device, or an event recorded behind the copy. Calls that wait for the stream by nature (item(), a
//     blocking copy, nonzero()) do that too.
//
// A query of something incomplete says no once, and time passes: the next query says yes.
//
// Not modelled: kernels of two streams that race with each other, and the host overtaking a kernel.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>

#include "devices.h"

namespace accelrl::musa {

c10::Stream current_stream(DeviceIndex device);

// Defers a copy between host aliases on the current stream of each of `devices`. `to_device`: `destination` is on one.
// `source_stays`: read the source on completion (pinned or device memory); else it is copied now.
void defer_copy(
    const at::Tensor& destination, const at::Tensor& source, c10::ArrayRef<DeviceIndex> devices, bool to_device,
    bool source_stays);

// What a kernel on the device's current stream is ordered behind.
void complete_copies_to_device(DeviceIndex device);
// What the host waits for.
void synchronize_stream(const c10::Stream& stream);
void synchronize_device(DeviceIndex device);

}  // namespace accelrl::musa
