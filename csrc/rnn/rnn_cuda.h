// What weft::rnn would do on a GPU, for weft.explain and the choice of an algorithm.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace weft {

struct RnnPlanSizes {
  int64_t B, H;
  int D;
  bool packed;
};

struct RnnPlanReport {
  std::string why_not;            // empty where the kernel runs
  std::string forward, backward;  // how, in words
  double step_us = 0;             // expected time of a step, forward and, if trained, backward
};

// May compile the kernels. `dtype` as torch prints it without "torch.".
RnnPlanReport rnn_plan_report(int device, std::string_view cell, std::string_view dtype, const RnnPlanSizes& sizes,
                              bool trains);

// Every geometry that fits, the fastest expected first: the text for WEFT_RNN_GEOMETRY, what compiles it, the expected
// microseconds of a step.
struct RnnGeometry {
  std::string text;
  std::vector<std::string> defines;
  double step_us;
};
std::vector<RnnGeometry> rnn_geometries(int device, std::string_view cell, std::string_view dtype,
                                        const RnnPlanSizes& sizes, bool backward);

}  // namespace weft
