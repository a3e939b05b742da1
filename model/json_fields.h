// The fields of a JSON object, read with their types checked: every error names the text, the field, what was expected
// and what came.
//
//   DSV4_ASSIGN_OR_RETURN(JsonFields fields, JsonFields::Parse(text, "config.json"));
//   DSV4_ASSIGN_OR_RETURN(int64_t size, fields.Integer("hidden_size"));
//     // config.json: hidden_size: expected an integer, got "4096"
#ifndef DSV4_MODEL_JSON_FIELDS_H_
#define DSV4_MODEL_JSON_FIELDS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nlohmann/json_fwd.hpp"

namespace dsv4 {

class JsonFields {
 public:
  // InvalidArgument unless the text is one JSON object in which no object has a key twice. `origin` names the text in
  // messages.
  static absl::StatusOr<JsonFields> Parse(std::string_view text, std::string_view origin);

  // A field that is null counts as missing here and below.
  bool Has(std::string_view name) const;

  // InvalidArgument if the field is missing or of another type. A number with a fraction or an exponent is no integer.
  absl::StatusOr<int64_t> Integer(std::string_view name) const;
  absl::StatusOr<double> Number(std::string_view name) const;
  // The nearest float; InvalidArgument also if the number is past the largest one.
  absl::StatusOr<float> Float(std::string_view name) const;
  absl::StatusOr<bool> Bool(std::string_view name) const;
  absl::StatusOr<std::string> String(std::string_view name) const;
  absl::StatusOr<std::vector<int64_t>> Integers(std::string_view name) const;
  absl::StatusOr<std::vector<std::string>> Strings(std::string_view name) const;
  absl::StatusOr<std::map<std::string, std::string, std::less<>>> StringMap(std::string_view name) const;
  absl::StatusOr<JsonFields> Object(std::string_view name) const;

  // InvalidArgument "<origin>: <path of the field>: <problem>".
  absl::Status Error(std::string_view name, std::string_view problem) const;

 private:
  absl::StatusOr<const nlohmann::json*> Find(std::string_view name) const;
  absl::Status TypeError(std::string_view name, std::string_view expected, const nlohmann::json& value) const;

  std::shared_ptr<const nlohmann::json> root_;
  const nlohmann::json* object_ = nullptr;  // in *root_
  std::string origin_;
  std::string path_;  // of this object in the text, with a dot at its end; empty for the text's own
};

}  // namespace dsv4

#endif  // DSV4_MODEL_JSON_FIELDS_H_
