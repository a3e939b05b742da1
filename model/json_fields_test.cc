#include "model/json_fields.h"

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "runtime/testing.h"

namespace dsv4 {
namespace {

constexpr auto kInvalidArgument = absl::StatusCode::kInvalidArgument;

TEST(JsonFields, ReadsEachType) {
  DSV4_ASSERT_OK_AND_ASSIGN(
      const JsonFields fields,
      JsonFields::Parse(R"({"i": -9223372036854775808, "u": 9223372036854775807, "f": 0.1, "b": true, "s": "a",
                            "is": [1, -2], "ss": ["x", ""], "m": {"a": "b"}, "o": {"p": {"i": 3}}, "n": null})",
                        "t.json"));
  EXPECT_EQ(fields.Integer("i").value(), std::numeric_limits<int64_t>::min());
  EXPECT_EQ(fields.Integer("u").value(), std::numeric_limits<int64_t>::max());
  EXPECT_EQ(fields.Number("f").value(), 0.1);
  EXPECT_EQ(fields.Float("f").value(), 0.1f);
  EXPECT_TRUE(fields.Bool("b").value());
  EXPECT_EQ(fields.String("s").value(), "a");
  EXPECT_EQ(fields.Integers("is").value(), (std::vector<int64_t>{1, -2}));
  EXPECT_EQ(fields.Strings("ss").value(), (std::vector<std::string>{"x", ""}));
  EXPECT_EQ(fields.StringMap("m").value(), (std::map<std::string, std::string, std::less<>>{{"a", "b"}}));
  EXPECT_FALSE(fields.Has("n"));
  EXPECT_FALSE(fields.Has("absent"));
}

TEST(JsonFields, NamesTextAndPathAndShowsTheValue) {
  DSV4_ASSERT_OK_AND_ASSIGN(const JsonFields fields,
                            JsonFields::Parse(R"({"o": {"p": {"i": "three", "list": [1, "two"]}}})", "t.json"));
  DSV4_ASSERT_OK_AND_ASSIGN(const JsonFields o, fields.Object("o"));
  DSV4_ASSERT_OK_AND_ASSIGN(const JsonFields p, o.Object("p"));
  EXPECT_THAT(p.Integer("i"),
              StatusIs(kInvalidArgument, R"(t.json: o.p.i: expected an integer of at most 64 bits, got "three")"));
  EXPECT_THAT(p.Integers("list"), StatusIs(kInvalidArgument, R"(t.json: o.p.list[1]: expected)"));
  EXPECT_THAT(p.Integer("absent"), StatusIs(kInvalidArgument, "t.json: o.p.absent: missing"));
  EXPECT_THAT(fields.String("o"), StatusIs(kInvalidArgument, "t.json: o: expected a string, got {"));
}

TEST(JsonFields, IntegersHave64Bits) {
  for (const char* value : {"9223372036854775808", "18446744073709551615", "18446744073709551616", "1e3", "2.0"}) {
    DSV4_ASSERT_OK_AND_ASSIGN(const JsonFields fields,
                              JsonFields::Parse("{\"i\": " + std::string(value) + "}", "t.json"));
    EXPECT_THAT(fields.Integer("i"), StatusIs(kInvalidArgument, "t.json: i: expected an integer of at most 64 bits"));
  }
}

TEST(JsonFields, ObjectsOutliveTheWhole) {
  JsonFields inner;
  {
    DSV4_ASSERT_OK_AND_ASSIGN(const JsonFields fields, JsonFields::Parse(R"({"o": {"i": 7}})", "t.json"));
    DSV4_ASSERT_OK_AND_ASSIGN(inner, fields.Object("o"));
  }
  EXPECT_EQ(inner.Integer("i").value(), 7);
}

TEST(JsonFields, RefusesAKeyThatIsThereTwice) {
  EXPECT_THAT(JsonFields::Parse(R"({"a": 1, "b": {"c": 1, "c": 2}})", "t.json"),
              StatusIs(kInvalidArgument, "t.json: c: expected once"));
  DSV4_EXPECT_OK(JsonFields::Parse(R"({"a": {"c": 1}, "b": {"c": 2}, "c": 3})", "t.json"));
}

TEST(JsonFields, RefusesDeepNesting) {
  const auto nested = [](int depth) {
    return "{\"a\": " + std::string(static_cast<size_t>(depth), '[') + std::string(static_cast<size_t>(depth), ']') +
           "}";
  };
  DSV4_EXPECT_OK(JsonFields::Parse(nested(63), "t.json"));
  EXPECT_THAT(JsonFields::Parse(nested(64), "t.json"),
              StatusIs(kInvalidArgument, "t.json: expected values at most 64"));
  EXPECT_THAT(JsonFields::Parse(nested(1 << 20), "t.json"), StatusIs(kInvalidArgument, "t.json: "));
}

TEST(JsonFields, ShortensLongValuesAndEscapesBytesThatAreNoText) {
  DSV4_ASSERT_OK_AND_ASSIGN(
      const JsonFields fields,
      JsonFields::Parse("{\"a\": \"" + std::string(5000, 'x') + "\", \"b\": \"\\u0000\\n\"}", "t"));
  EXPECT_LT(fields.Integer("a").status().message().size(), 200u);
  EXPECT_THAT(fields.Integer("b"), StatusIs(kInvalidArgument, R"(got "\u0000\n")"));
}

}  // namespace
}  // namespace dsv4
