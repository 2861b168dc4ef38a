#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>

#include <vector>

namespace accelrl::musa {

namespace {

class MusaGenerator final : public c10::GeneratorImpl {
 public:
  MusaGenerator(DeviceIndex device, at::Generator host)
      : GeneratorImpl(Device(kMusa, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host_(std::move(host)) {}

  const at::Generator& host() const {
    return host_;
  }

  void set_current_seed(uint64_t seed) override {
    host_.set_current_seed(seed);
  }
  uint64_t current_seed() const override {
    return host_.current_seed();
  }
  uint64_t seed() override {
    return host_.seed();
  }
  // The host's algorithm is a Mersenne twister, which has no offset; a real device counts Philox draws here.
  void set_offset(uint64_t) override {
    TORCH_CHECK(false, "the emulated MUSA generator has no offset: save and restore its whole state instead");
  }
  uint64_t get_offset() const override {
    TORCH_CHECK(false, "the emulated MUSA generator has no offset: save and restore its whole state instead");
  }
  void set_state(const c10::TensorImpl& state) override {
    host_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host_.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  MusaGenerator* clone_impl() const override {
    return new MusaGenerator(device_.index(), host_.clone());
  }

  at::Generator host_;
};

}  // namespace

at::Generator new_generator(DeviceIndex device) {
  return at::make_generator<MusaGenerator>(or_current(device), at::detail::createCPUGenerator());
}

const at::Generator& default_generator(DeviceIndex device) {
  static auto* generators = [] {
    auto* made = new std::vector<at::Generator>;
    for (int index = 0; index < kMaxDevices; ++index) {
      made->push_back(new_generator(DeviceIndex(index)));
    }
    return made;
  }();
  return generators->at(or_current(device));
}

at::Generator host_generator(const at::Generator& generator) {
  return static_cast<MusaGenerator*>(generator.unsafeGetGeneratorImpl())->host();
}

}  // namespace accelrl::musa
