#include "model/json_fields.h"

#include <cmath>
#include <limits>
#include <set>
#include <utility>

#include "nlohmann/json.hpp"
#include "runtime/status.h"
#include "runtime/str_cat.h"

namespace dsv4 {
namespace {

using Json = nlohmann::json;

// Looks for what nlohmann::json::parse does not report without exceptions: where the text is broken, keys that an
// object has twice, and values so deep in one another that walking them would exhaust the stack.
class TextChecker : public nlohmann::json_sax<Json> {
 public:
  const std::string& problem() const { return problem_; }

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(std::size_t) override {
    keys_.emplace_back();
    return Enter();
  }
  bool end_object() override {
    keys_.pop_back();
    --depth_;
    return true;
  }
  bool start_array(std::size_t) override { return Enter(); }
  bool end_array() override {
    --depth_;
    return true;
  }
  bool key(string_t& name) override {
    if (keys_.back().insert(name).second) return true;
    problem_ = StrCat(name, ": expected once in its object, got twice");
    return false;
  }
  bool parse_error(std::size_t position, const std::string& last_token, const nlohmann::detail::exception&) override {
    problem_ = StrCat("expected JSON, got \"", last_token, "\" at byte ", position);
    return false;
  }

 private:
  static constexpr int kMaxDepth = 64;

  bool Enter() {
    if (++depth_ <= kMaxDepth) return true;
    problem_ = StrCat("expected values at most ", kMaxDepth, " deep in one another, got more");
    return false;
  }

  int depth_ = 0;
  std::vector<std::set<std::string>> keys_;  // of the objects that are open
  std::string problem_;
};

// A value as the text has it, short enough for a message.
std::string ShortText(const Json& value) {
  constexpr size_t kMaxLength = 60;
  const std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  return text.size() <= kMaxLength ? text : text.substr(0, kMaxLength) + "...";
}

bool ToInt64(const Json& value, int64_t* result) {
  if (!value.is_number_integer()) return false;
  if (value.is_number_unsigned() && value.get<uint64_t>() > std::numeric_limits<int64_t>::max()) return false;
  *result = value.get<int64_t>();
  return true;
}

}  // namespace

absl::StatusOr<JsonFields> JsonFields::Parse(std::string_view text, std::string_view origin) {
  TextChecker checker;
  if (!Json::sax_parse(text.begin(), text.end(), &checker)) {
    return absl::InvalidArgumentError(StrCat(origin, ": ", checker.problem()));
  }
  auto root = std::make_shared<const Json>(Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false));
  if (!root->is_object()) {
    return absl::InvalidArgumentError(StrCat(origin, ": expected a JSON object, got ", ShortText(*root)));
  }
  JsonFields fields;
  fields.object_ = root.get();
  fields.root_ = std::move(root);
  fields.origin_ = std::string(origin);
  return fields;
}

bool JsonFields::Has(std::string_view name) const { return Find(name).ok(); }

absl::StatusOr<const Json*> JsonFields::Find(std::string_view name) const {
  const auto it = object_->find(std::string(name));
  if (it == object_->end() || it->is_null()) return Error(name, "missing");
  return &*it;
}

absl::Status JsonFields::Error(std::string_view name, std::string_view problem) const {
  return absl::InvalidArgumentError(StrCat(origin_, ": ", path_, name, ": ", problem));
}

absl::Status JsonFields::TypeError(std::string_view name, std::string_view expected, const Json& value) const {
  return Error(name, StrCat("expected ", expected, ", got ", ShortText(value)));
}

absl::StatusOr<int64_t> JsonFields::Integer(std::string_view name) const {
  DSV4_ASSIGN_OR_RETURN(const Json* value, Find(name));
  int64_t result = 0;
  if (!ToInt64(*value, &result)) return TypeError(name, "an integer of at most 64 bits", *value);
  return result;
}

absl::StatusOr<double> JsonFields::Number(std::string_view name) const {
  DSV4_ASSIGN_OR_RETURN(const Json* value, Find(name));
  if (!value->is_number()) return TypeError(name, "a number", *value);
  return value->get<double>();
}

absl::StatusOr<float> JsonFields::Float(std::string_view name) const {
  DSV4_ASSIGN_OR_RETURN(const double value, Number(name));
  if (std::abs(value) > std::numeric_limits<float>::max()) {
    return Error(name, StrCat("expected a number that fits fp32, got ", value));
  }
  return static_cast<float>(value);
}

absl::StatusOr<bool> JsonFields::Bool(std::string_view name) const {
  DSV4_ASSIGN_OR_RETURN(const Json* value, Find(name));
  if (!value->is_boolean()) return TypeError(name, "true or false", *value);
  return value->get<bool>();
}

absl::StatusOr<std::string> JsonFields::String(std::string_view name) const {
  DSV4_ASSIGN_OR_RETURN(const Json* value, Find(name));
  if (!value->is_string()) return TypeError(name, "a string", *value);
  return value->get<std::string>();
}

absl::StatusOr<std::vector<int64_t>> JsonFields::Integers(std::string_view name) const {
  DSV4_ASSIGN_OR_RETURN(const Json* value, Find(name));
  if (!value->is_array()) return TypeError(name, "a list of integers", *value);
  std::vector<int64_t> results;
  for (const Json& element : *value) {
    int64_t result = 0;
    if (!ToInt64(element, &result)) {
      return TypeError(StrCat(name, "[", results.size(), "]"), "an integer of at most 64 bits", element);
    }
    results.push_back(result);
  }
  return results;
}

absl::StatusOr<std::vector<std::string>> JsonFields::Strings(std::string_view name) const {
  DSV4_ASSIGN_OR_RETURN(const Json* value, Find(name));
  if (!value->is_array()) return TypeError(name, "a list of strings", *value);
  std::vector<std::string> results;
  for (const Json& element : *value) {
    if (!element.is_string()) return TypeError(StrCat(name, "[", results.size(), "]"), "a string", element);
    results.push_back(element.get<std::string>());
  }
  return results;
}

absl::StatusOr<std::map<std::string, std::string, std::less<>>> JsonFields::StringMap(std::string_view name) const {
  DSV4_ASSIGN_OR_RETURN(const Json* value, Find(name));
  if (!value->is_object()) return TypeError(name, "an object", *value);
  std::map<std::string, std::string, std::less<>> results;
  for (const auto& [key, element] : value->items()) {
    if (!element.is_string()) return TypeError(StrCat(name, ".", key), "a string", element);
    results.emplace(key, element.get<std::string>());
  }
  return results;
}

absl::StatusOr<JsonFields> JsonFields::Object(std::string_view name) const {
  DSV4_ASSIGN_OR_RETURN(const Json* value, Find(name));
  if (!value->is_object()) return TypeError(name, "an object", *value);
  JsonFields fields = *this;
  fields.object_ = value;
  fields.path_ = StrCat(path_, name, ".");
  return fields;
}

}  // namespace dsv4
