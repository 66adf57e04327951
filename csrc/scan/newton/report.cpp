#include "scan/newton/report.h"

#include <utility>

namespace weft::scan {
namespace {

thread_local std::vector<std::shared_ptr<NewtonReport>> open_reports;

}  // namespace

NewtonReport* newton_report() {
  return open_reports.empty() ? nullptr : open_reports.back().get();
}

void push_newton_report(std::shared_ptr<NewtonReport> report) {
  open_reports.push_back(std::move(report));
}

void pop_newton_report() {
  if (!open_reports.empty()) open_reports.pop_back();
}

}  // namespace weft::scan
