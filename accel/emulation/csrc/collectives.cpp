#include "collectives.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <vector>

#include "aliases.h"
#include "devices.h"
#include "memory.h"
#include "streams.h"

namespace accelrl::musa {

namespace {

using c10d::OpType;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Finish = std::function<void()>;

// The carrier's work, with the caller's device tensors as its result and a last step that runs once, when it is done.
class MusaWork final : public c10d::Work {
 public:
  MusaWork(WorkPtr carried, Tensors outputs, Finish finish, int rank, OpType type)
      : Work(rank, type), carried_(std::move(carried)), outputs_(std::move(outputs)), finish_(std::move(finish)) {}

  bool isCompleted() override {
    const bool completed = carried_->isCompleted();
    if (completed && carried_->isSuccess()) {
      finish_once();
    }
    return completed;
  }
  bool isSuccess() const override {
    return carried_->isSuccess();
  }
  std::exception_ptr exception() const override {
    return carried_->exception();
  }
  int sourceRank() const override {
    return carried_->sourceRank();
  }
  Tensors result() override {
    return outputs_;
  }
  void synchronize() override {
    carried_->wait();
    finish_once();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    const bool done = carried_->wait(timeout);
    finish_once();
    return done;
  }
  void abort() override {
    carried_->abort();
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::vector<Device> devices;
    for (const auto& output : outputs_) {
      if (std::find(devices.begin(), devices.end(), output.device()) == devices.end()) {
        devices.push_back(output.device());
      }
    }
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    auto self = c10::intrusive_ptr<MusaWork>::unsafe_reclaim_from_nonowning(this);
    carried_->getFuture()->addCallback([future, self](c10::ivalue::Future& carried) {
      if (carried.hasError()) {
        future->setError(carried.exception_ptr());
      } else {
        self->finish_once();
        future->markCompleted(c10::IValue(self->outputs_));
      }
    });
    return future;
  }

 private:
  void finish_once() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!finished_) {
      finished_ = true;
      if (finish_) {
        finish_();
      }
    }
  }

  WorkPtr carried_;
  Tensors outputs_;
  Finish finish_;
  std::mutex mutex_;
  bool finished_ = false;
};

// What the end of a coalesced section gives back: all of its works as one.
class CoalescedWork final : public c10d::Work {
 public:
  CoalescedWork(std::vector<WorkPtr> works, int rank) : Work(rank, OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(), [](auto& work) { return work->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::all_of(works_.begin(), works_.end(), [](auto& work) { return work->isSuccess(); });
  }
  void synchronize() override {
    for (auto& work : works_) {
      work->synchronize();
    }
  }
  bool wait(std::chrono::milliseconds timeout) override {
    return std::all_of(works_.begin(), works_.end(), [timeout](auto& work) { return work->wait(timeout); });
  }

 private:
  std::vector<WorkPtr> works_;
};

// Host aliases. The collective is queued behind the copies of the current stream, like any kernel.

at::Tensor on_host(const at::Tensor& tensor) {
  TORCH_CHECK(
      tensor.device().type() == kMusa, "ProcessGroupMCCL expects tensors on a musa device, and got one on ",
      tensor.device());
  TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous");
  if (C10_UNLIKELY(settings().asynchronous)) {
    complete_copies_to_device(tensor.device().index());
  }
  return host_view(tensor);
}

Tensors on_host(const Tensors& tensors) {
  Tensors aliases;
  for (const auto& tensor : tensors) {
    aliases.push_back(on_host(tensor));
  }
  return aliases;
}

TensorLists on_host(const TensorLists& lists) {
  TensorLists aliases;
  for (const auto& list : lists) {
    aliases.push_back(on_host(list));
  }
  return aliases;
}

Tensors flattened(const TensorLists& lists) {
  Tensors all;
  for (const auto& list : lists) {
    all.insert(all.end(), list.begin(), list.end());
  }
  return all;
}

// What a communicator holds on its device from its first collective on, until it is shut down: buffers to send from.
constexpr int64_t kCommunicatorBytes = 4 << 20;

class Mccl final : public c10d::Backend {
 public:
  Mccl(c10::intrusive_ptr<c10d::Backend> carrier, int rank, int size, std::chrono::milliseconds timeout)
      : Backend(rank, size),
        carrier_(std::move(carrier)),
        options_(c10::make_intrusive<c10d::Backend::Options>("mccl", timeout)) {}
  ~Mccl() override {
    give_buffers_back();
  }

  const std::string getBackendName() const override {
    return "mccl";
  }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return options_;
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    options_->timeout = timeout;
    carrier_->setTimeout(timeout);
  }
  void setSequenceNumberForGroup() override {
    carrier_->setSequenceNumberForGroup();
  }
  uint64_t getSequenceNumberForGroup() override {
    return carrier_->getSequenceNumberForGroup();
  }
  void abort() override {
    carrier_->abort();
    give_buffers_back();
  }
  void shutdown() override {
    carrier_->shutdown();
    give_buffers_back();
  }

  // Without coalescing c10d would leave a section's works unwaited for and say nothing.
  bool supportsCoalescing() const override {
    return true;
  }
  void startCoalescing() override {
    coalescing_ = true;
    section_.clear();
  }
  WorkPtr endCoalescing() override {
    coalescing_ = false;
    return c10::make_intrusive<CoalescedWork>(std::exchange(section_, {}), rank_);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto host = on_host(tensors);
    return work(carrier_->broadcast(host, options), tensors, OpType::BROADCAST);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& asked) override {
    auto options = asked;
    auto host = on_host(tensors);
    auto finish = mean_as_sum(options, host);
    return work(carrier_->allreduce(host, options), tensors, OpType::ALLREDUCE, std::move(finish));
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& asked) override {
    auto options = asked;
    auto host = on_host(tensors);
    auto finish = mean_as_sum(options, host);
    return work(
        carrier_->allreduce_coalesced(host, options), tensors, OpType::ALLREDUCE_COALESCED, std::move(finish));
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& asked) override {
    auto options = asked;
    auto host = on_host(tensors);
    auto finish = mean_as_sum(options, host);
    if (options.rootRank != rank_) {
      finish = {};  // only the root's tensor holds the sum
    }
    return work(carrier_->reduce(host, options), tensors, OpType::REDUCE, std::move(finish));
  }
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto host_outputs = on_host(outputs);
    auto host_inputs = on_host(inputs);
    return work(carrier_->allgather(host_outputs, host_inputs, options), flattened(outputs), OpType::ALLGATHER);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    auto host_output = on_host(output);
    auto host_input = on_host(input);
    return work(carrier_->_allgather_base(host_output, host_input, options), {output}, OpType::_ALLGATHER_BASE);
  }
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto host_outputs = on_host(outputs);
    auto host_inputs = on_host(inputs);
    return work(
        carrier_->allgather_coalesced(host_outputs, host_inputs, options), flattened(outputs),
        OpType::ALLGATHER_COALESCED);
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto host_outputs = on_host(outputs);
    auto host_inputs = on_host(inputs);
    return work(
        carrier_->allgather_into_tensor_coalesced(host_outputs, host_inputs, options), outputs, OpType::COALESCED);
  }
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto host_outputs = on_host(outputs);
    auto host_inputs = on_host(inputs);
    return work(carrier_->gather(host_outputs, host_inputs, options), flattened(outputs), OpType::GATHER);
  }
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override {
    auto host_outputs = on_host(outputs);
    auto host_inputs = on_host(inputs);
    return work(carrier_->scatter(host_outputs, host_inputs, options), outputs, OpType::SCATTER);
  }
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& asked) override {
    auto options = asked;
    auto host_outputs = on_host(outputs);
    auto host_inputs = on_host(inputs);
    auto finish = mean_as_sum(options, host_outputs);
    return work(
        carrier_->reduce_scatter(host_outputs, host_inputs, options), outputs, OpType::REDUCE_SCATTER,
        std::move(finish));
  }
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& asked) override {
    auto options = asked;
    auto host_output = on_host(output);
    auto host_input = on_host(input);
    auto finish = mean_as_sum(options, {host_output});
    return work(
        carrier_->_reduce_scatter_base(host_output, host_input, options), {output}, OpType::_REDUCE_SCATTER_BASE,
        std::move(finish));
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& asked) override {
    auto options = asked;
    auto host_outputs = on_host(outputs);
    auto host_inputs = on_host(inputs);
    auto finish = mean_as_sum(options, host_outputs);
    return work(
        carrier_->reduce_scatter_tensor_coalesced(host_outputs, host_inputs, options), outputs,
        OpType::REDUCE_SCATTER_TENSOR_COALESCED, std::move(finish));
  }
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options) override {
    auto host_output = on_host(output);
    auto host_input = on_host(input);
    return work(
        carrier_->alltoall_base(host_output, host_input, output_splits, input_splits, options), {output},
        OpType::ALLTOALL_BASE);
  }
  // gloo exchanges one flat tensor only.
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto host_outputs = on_host(outputs);
    std::vector<int64_t> received, sent;
    Tensors flat;
    for (const auto& input : on_host(inputs)) {
      sent.push_back(input.numel());
      flat.push_back(input.reshape({-1}));
    }
    int64_t total = 0;
    for (const auto& output : host_outputs) {
      received.push_back(output.numel());
      total += output.numel();
    }
    auto from = at::cat(flat);
    auto into = at::empty({total}, from.options());
    const auto spread = [into, from, host_outputs, received] {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      const auto parts = into.split_with_sizes(received);
      for (size_t i = 0; i < parts.size(); ++i) {
        auto output = host_outputs[i];
        output.copy_(parts[i].view(output.sizes()));
      }
    };
    return work(carrier_->alltoall_base(into, from, received, sent, options), outputs, OpType::ALLTOALL, spread);
  }
  WorkPtr send(Tensors& tensors, int destination, int tag) override {
    auto host = on_host(tensors);
    return work(carrier_->send(host, destination, tag), tensors, OpType::SEND);
  }
  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    auto host = on_host(tensors);
    return work(carrier_->recv(host, source, tag), tensors, OpType::RECV);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    auto host = on_host(tensors);
    return work(carrier_->recvAnysource(host, tag), tensors, OpType::RECVANYSOURCE);
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    return work(carrier_->barrier(), {}, OpType::BARRIER);
  }
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_for_all) override {
    carrier_->monitoredBarrier(options, wait_for_all);
  }

 private:
  void take_buffers() {
    if (holder_.exchange(1) == 0) {
      device_ = current_device();
      take_outside(device_, kCommunicatorBytes);
    }
  }
  void give_buffers_back() {
    if (holder_.exchange(0) == 1) {
      take_outside(device_, -kCommunicatorBytes);
    }
  }

  WorkPtr work(WorkPtr carried, Tensors outputs, OpType type, Finish finish = {}) {
    take_buffers();
    auto made = c10::make_intrusive<MusaWork>(
        std::move(carried), std::move(outputs), std::move(finish), rank_, type);
    if (coalescing_) {
      section_.push_back(made);
    }
    return made;
  }

  // mccl averages and gloo does not: ask for the sum and divide when it is there.
  template <class AnyOptions>
  Finish mean_as_sum(AnyOptions& options, const Tensors& host) const {
    if (options.reduceOp != c10d::ReduceOp::AVG) {
      return {};
    }
    options.reduceOp = c10d::ReduceOp::SUM;
    return [host, size = size_] {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      for (auto tensor : host) {
        tensor.div_(size);
      }
    };
  }

  c10::intrusive_ptr<c10d::Backend> carrier_;
  c10::intrusive_ptr<Options> options_;
  bool coalescing_ = false;
  std::vector<WorkPtr> section_;
  std::atomic<int> holder_{0};
  DeviceIndex device_ = 0;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_mccl(
    c10::intrusive_ptr<c10d::Backend> carrier, int rank, int size, std::chrono::milliseconds timeout) {
  return c10::make_intrusive<Mccl>(std::move(carrier), rank, size, timeout);
}

}  // namespace accelrl::musa
