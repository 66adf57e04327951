// SHA-256 (FIPS 180-4): names cache entries and guards their content.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace weft::jit {

class Sha256 {
 public:
  using Digest = std::array<unsigned char, 32>;

  Sha256& update(std::string_view bytes);
  // A field of a record: its length goes first, so that no two records run together to the same bytes.
  Sha256& field(std::string_view bytes);
  Digest finish();

 private:
  void block(const unsigned char* bytes);

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  unsigned char pending_[64];
  uint64_t length_ = 0;
};

std::string hex(const Sha256::Digest& digest);

}  // namespace weft::jit
