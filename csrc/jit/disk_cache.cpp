#include "jit/disk_cache.h"

#include <fcntl.h>
#include <pwd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <string>
#include <string_view>

#include "jit/digest.h"

namespace weft::jit {
namespace {

// Behind the content, because tools that read a cubin ignore what follows it.
constexpr std::string_view kMark = "weftjit1";
constexpr size_t kTrailer = sizeof(Sha256::Digest) + kMark.size();

std::string trailer(std::string_view content) {
  const Sha256::Digest digest = Sha256().update(content).finish();
  return std::string(digest.begin(), digest.end()).append(kMark);
}

std::optional<std::vector<char>> read_all(int file) {
  std::vector<char> bytes;
  constexpr size_t kStep = 1 << 16;
  for (;;) {
    const size_t size = bytes.size();
    bytes.resize(size + kStep);
    const ssize_t got = ::read(file, bytes.data() + size, kStep);
    bytes.resize(size + static_cast<size_t>(std::max<ssize_t>(got, 0)));
    if (got == 0) return bytes;
    if (got < 0 && errno != EINTR) return std::nullopt;
  }
}

bool write_all(int file, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(file, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return true;
}

}  // namespace

std::filesystem::path cache_root() {
  if (const char* chosen = std::getenv("WEFT_CACHE_DIR"); chosen != nullptr && *chosen != '\0') return chosen;
  const char* home = std::getenv("HOME");
  if (home == nullptr || *home == '\0') {
    static const std::string account = [] {  // once, because getpwuid is not for several threads
      const passwd* user = ::getpwuid(::getuid());
      return std::string(user == nullptr || user->pw_dir == nullptr ? "" : user->pw_dir);
    }();
    home = account.c_str();
  }
  return *home == '\0' ? std::filesystem::path() : std::filesystem::path(home) / ".cache" / "weft";
}

std::optional<std::vector<char>> read_entry(const std::filesystem::path& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return std::nullopt;
  auto bytes = read_all(file);
  ::close(file);
  if (!bytes) return std::nullopt;
  if (bytes->size() > kTrailer) {
    const std::string_view content(bytes->data(), bytes->size() - kTrailer);
    if (trailer(content) == std::string_view(bytes->data() + content.size(), kTrailer)) {
      bytes->resize(content.size());
      return bytes;
    }
  }
  ::unlink(path.c_str());
  return std::nullopt;
}

void write_entry(const std::filesystem::path& path, const std::vector<char>& content) {
  std::error_code failed;
  std::filesystem::create_directories(path.parent_path(), failed);
  if (failed) return;
  std::string temporary = path.string() + ".XXXXXX";
  const int file = ::mkostemp(temporary.data(), O_CLOEXEC);
  if (file < 0) return;
  const std::string_view bytes(content.data(), content.size());
  const bool written = write_all(file, bytes) && write_all(file, trailer(bytes));
  const bool closed = ::close(file) == 0;
  if (!written || !closed || ::rename(temporary.c_str(), path.c_str()) != 0) ::unlink(temporary.c_str());
}

}  // namespace weft::jit
