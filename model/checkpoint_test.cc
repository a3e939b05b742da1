#include "model/checkpoint.h"

#include <filesystem>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "model/checkpoint_testing.h"
#include "runtime/safetensors.h"
#include "runtime/testing.h"

namespace dsv4 {
namespace {

namespace fs = std::filesystem;
constexpr auto kDataLoss = absl::StatusCode::kDataLoss;
constexpr auto kInvalidArgument = absl::StatusCode::kInvalidArgument;
constexpr auto kNotFound = absl::StatusCode::kNotFound;

TEST(Checkpoint, KnowsItsTensors) {
  DSV4_ASSERT_OK_AND_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(TinyFolder()));
  EXPECT_EQ(checkpoint.num_tensors(), static_cast<int64_t>(TinyFile().tensors().size()));
  EXPECT_EQ(checkpoint.config().hidden_size, 256);
  EXPECT_TRUE(checkpoint.Has("layers.0.attn.wq_a.weight"));
  EXPECT_FALSE(checkpoint.Has("layers.0.attn.wq_a"));
  DSV4_ASSERT_OK_AND_ASSIGN(const FileTensor tensor, checkpoint.Get("layers.0.attn.wq_a.weight"));
  EXPECT_EQ(tensor.shape, (std::vector<int64_t>{128, 256}));
  EXPECT_THAT(checkpoint.Get("layers.9.attn.wq_a.weight"), StatusIs(kNotFound, "layers.9.attn.wq_a.weight"));
  EXPECT_THAT(checkpoint.Get("layers.9.attn.wq_a.weight"), StatusIs(kNotFound, checkpoint.directory()));
}

TEST(Checkpoint, NamesWhatIsMissing) {
  EXPECT_THAT(Checkpoint::Open("/nonexistent/model"), StatusIs(kNotFound, "/nonexistent/model: no such directory"));
  EXPECT_THAT(Checkpoint::Open(TinyPath("config.json")), StatusIs(kNotFound, "config.json: no such directory"));
  TestFolder folder;
  EXPECT_THAT(Checkpoint::Open(folder.path()), StatusIs(kNotFound, folder.File("config.json")));
  fs::copy_file(TinyPath("config.json"), folder.File("config.json"));
  EXPECT_THAT(Checkpoint::Open(folder.path()), StatusIs(kNotFound, folder.path() + ": expected model.safetensors or"));
}

TEST(Checkpoint, NamesTheFieldThatItsConfigLacks) {
  TinyVariant variant;
  variant.config.erase("o_groups");
  const std::string directory = variant.Write();
  EXPECT_THAT(Checkpoint::Open(directory), StatusIs(kInvalidArgument, directory + "/config.json: o_groups: missing"));
}

TEST(Checkpoint, NamesABrokenFile) {
  TestFolder folder;
  fs::copy_file(TinyPath("config.json"), folder.File("config.json"));
  WriteText(folder.File("model.safetensors"), "no tensors here");
  EXPECT_THAT(Checkpoint::Open(folder.path()), StatusIs(kDataLoss, folder.File("model.safetensors")));
}

TEST(Checkpoint, RefusesABadIndexByName) {
  const std::string norm = "weight_map.norm.weight";
  const struct {
    std::string index;
    absl::StatusCode code;
    std::string named;
  } cases[] = {
      {"", kInvalidArgument, "expected JSON"},
      {"{\"weight_map\": {\"norm.weight\": \"a.saf", kInvalidArgument, "expected JSON"},
      {"[]", kInvalidArgument, "expected a JSON object"},
      {"{}", kInvalidArgument, "weight_map: missing"},
      {"{\"weight_map\": []}", kInvalidArgument, "weight_map: expected an object"},
      {"{\"weight_map\": {\"norm.weight\": 1}}", kInvalidArgument, norm + ": expected a string"},
      {"{\"weight_map\": {\"norm.weight\": \"b.safetensors\"}}", kNotFound, norm + ": no such file"},
      {"{\"weight_map\": {\"other.weight\": \"a.safetensors\"}}", kInvalidArgument,
       "weight_map.other.weight: expected a tensor of a.safetensors"},
      {"{\"weight_map\": {\"norm.weight\": \"../a.safetensors\"}}", kInvalidArgument, norm + ": expected the name"},
      {"{\"weight_map\": {\"norm.weight\": \"/etc/passwd\"}}", kInvalidArgument, norm + ": expected the name"},
      {"{\"weight_map\": {\"norm.weight\": \"x/../a.safetensors\"}}", kInvalidArgument, norm + ": expected the name"},
      {"{\"weight_map\": {\"norm.weight\": \"..\"}}", kInvalidArgument, norm + ": expected the name"},
      {"{\"weight_map\": {\"norm.weight\": \".\"}}", kInvalidArgument, norm + ": expected the name"},
      {"{\"weight_map\": {\"norm.weight\": \"\"}}", kInvalidArgument, norm + ": expected the name"},
      {"{\"weight_map\": {\"norm.weight\": \"a.safetensors\\u0000\"}}", kInvalidArgument, norm + ": expected the name"},
      {"{\"weight_map\": {\"norm.weight\": \"a.safetensors\", \"norm.weight\": \"a.safetensors\"}}", kInvalidArgument,
       "norm.weight: expected once"},
      {"{\"weight_map\": {\"norm.weight\": \"broken.safetensors\"}}", kDataLoss, "broken.safetensors"},
  };
  for (const auto& c : cases) {
    TestFolder folder;
    fs::copy_file(TinyPath("config.json"), folder.File("config.json"));
    WriteTensors(folder.File("a.safetensors"), {{"norm.weight", Zeros(FileDType::kBf16, {256})}});
    WriteText(folder.File("broken.safetensors"), "no tensors here");
    WriteText(folder.File("model.safetensors.index.json"), c.index);
    const absl::StatusOr<Checkpoint> checkpoint = Checkpoint::Open(folder.path());
    EXPECT_THAT(checkpoint, StatusIs(c.code, c.named)) << c.index;
    if (c.named != "broken.safetensors") {
      EXPECT_THAT(checkpoint, StatusIs(c.code, folder.File("model.safetensors.index.json"))) << c.index;
    }
  }
}

TEST(Checkpoint, PrefersTheSingleFile) {
  TestFolder folder;
  fs::copy_file(TinyPath("config.json"), folder.File("config.json"));
  fs::create_symlink(TinyPath("model.safetensors"), folder.File("model.safetensors"));
  WriteText(folder.File("model.safetensors.index.json"), "stale");
  DSV4_ASSERT_OK_AND_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(folder.path()));
  EXPECT_EQ(checkpoint.FileOf("norm.weight"), folder.File("model.safetensors"));
  EXPECT_EQ(checkpoint.FileOf("absent"), folder.path());
}

}  // namespace
}  // namespace dsv4
