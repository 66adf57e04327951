// Limits of the instruction that is a product and the kernel that follows it.
#pragma once

namespace weft::vertex {

constexpr int kPairRows = 32;  // of the product; more are several pairs

}  // namespace weft::vertex
