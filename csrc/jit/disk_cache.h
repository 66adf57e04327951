// Files by name, in one folder: whole or absent, whoever else writes there. Nothing here throws on a bad disk.
#pragma once
#include <filesystem>
#include <optional>
#include <vector>

namespace weft::jit {

// $WEFT_CACHE_DIR, else ~/.cache/weft; empty where there is no home either.
std::filesystem::path cache_root();

// The content of an entry; nothing where there is none, or one that was damaged, which is removed.
std::optional<std::vector<char>> read_entry(const std::filesystem::path& path);

// Writes an entry through a temporary file in the same folder, making the folder. A failure leaves nothing behind.
void write_entry(const std::filesystem::path& path, const std::vector<char>& content);

}  // namespace weft::jit
