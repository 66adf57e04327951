// A number of chunks for experiments and tests, whatever the costs say.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <stdexcept>

namespace weft::rnn {

inline std::optional<int64_t> forced_chunks() {
  const char* const forced = std::getenv("WEFT_RNN_NEWTON_CHUNKS");
  if (forced == nullptr || *forced == 0) return std::nullopt;
  char* end = nullptr;
  const long chunks = std::strtol(forced, &end, 10);
  if (*end != 0 || chunks < 1) throw std::runtime_error("weft: WEFT_RNN_NEWTON_CHUNKS must be a positive number");
  return chunks;
}

}  // namespace weft::rnn
