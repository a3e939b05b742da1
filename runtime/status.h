// absl::Status plumbing: the two macros that every fallible function uses.
//
//   absl::Status Load(std::string_view path) {
//     DSV4_ASSIGN_OR_RETURN(File file, File::Open(path));
//     DSV4_RETURN_IF_ERROR(file.Check());
//     return absl::OkStatus();
//   }
//
// A message names the tensor or field, what was expected and what came, in lower case.
#ifndef DSV4_RUNTIME_STATUS_H_
#define DSV4_RUNTIME_STATUS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define DSV4_RETURN_IF_ERROR(expression)                       \
  do {                                                         \
    if (absl::Status dsv4_status = (expression); !dsv4_status.ok()) \
      return dsv4_status;                                      \
  } while (false)

#define DSV4_STATUS_CONCAT_INNER(a, b) a##b
#define DSV4_STATUS_CONCAT(a, b) DSV4_STATUS_CONCAT_INNER(a, b)

#define DSV4_ASSIGN_OR_RETURN(declaration, expression) \
  DSV4_ASSIGN_OR_RETURN_INNER(DSV4_STATUS_CONCAT(dsv4_statusor_, __LINE__), declaration, expression)
#define DSV4_ASSIGN_OR_RETURN_INNER(statusor, declaration, expression) \
  auto statusor = (expression);                                        \
  if (!statusor.ok()) return std::move(statusor).status();             \
  declaration = *std::move(statusor)

#endif  // DSV4_RUNTIME_STATUS_H_
