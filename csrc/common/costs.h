// What work takes on a GPU: the numbers by which algorithms, layouts and numbers of chunks are chosen.
//
// They are measured on one GPU and written to python/weft/costs/<gpu>.json by `python -m benchmarks.fit`; Python reads
// the files when it loads the library and adds them here. Every GPU then has the costs of its own file, or of the one
// whose GPU is nearest, scaled by what the driver tells of both. Torch- and CUDA-free.
#pragma once
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace weft::costs {

// 0 where the driver does not tell.
struct Gpu {
  std::string name;
  int capability = 0;  // 90 for 9.0
  int multiprocessors = 0;
  double clock_mhz = 0, bandwidth_gbs = 0;  // the highest; of device memory
};

// Numbers by name; a missing one is a std::out_of_range that names it.
class Table {
 public:
  Table() = default;
  explicit Table(std::string name) : name_(std::move(name)) {}

  double operator()(std::string_view name) const { return numbers(name).at(0); }
  const std::vector<double>& numbers(std::string_view name) const;
  const std::map<std::string, std::vector<double>, std::less<>>& all() const { return numbers_; }
  void put(const std::string& name, std::vector<double> numbers) { numbers_[name] = std::move(numbers); }

 private:
  std::string name_;
  std::map<std::string, std::vector<double>, std::less<>> numbers_;
};

struct Costs {
  Gpu measured_on;
  bool extrapolated = false;  // from another GPU
  std::map<std::string, Table, std::less<>> tables;

  const Table& table(std::string_view name) const;
};

// As a file has them: table -> what its numbers go with -> name -> numbers. Numbers are times, and go with
//   clock:  the time of one cycle;
//   chip:   the time of a cycle shared by all multiprocessors;
//   memory: the time that a byte of device memory takes;
//   fixed:  nothing of the GPU: what the host does, shares and limits.
using Measured = std::map<std::string, std::map<std::string, std::map<std::string, std::vector<double>>>>;

// Adds a file's, instead of those added before for a GPU of the same name. std::invalid_argument for numbers that go
// with something else.
void add(const Gpu& gpu, const Measured& tables);

// Of the GPUs added: the one of this name and this many multiprocessors, else the nearest in compute capability and
// then in multiprocessors, scaled. A GPU without a name is the first added, as it was measured. std::out_of_range where
// none was added.
Costs of(const Gpu& gpu);

}  // namespace weft::costs
