// Checks the vectors of the wire format (tests/data/wire): vectors vectors.tsv

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/util/json_util.h>
#include <google/protobuf/util/message_differencer.h>

#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>

#include "hashes.h"
#include "tensors.h"
#include "tinkerpool/v1/adapters.pb.h"
#include "tinkerpool/v1/checkpoints.pb.h"
#include "tinkerpool/v1/imports.pb.h"
#include "tinkerpool/v1/operations.pb.h"
#include "tinkerpool/v1/sampling.pb.h"
#include "tinkerpool/v1/training.pb.h"

namespace {

namespace pb = google::protobuf;
namespace v1 = tinkerpool::v1;
namespace client = tinkerpool_client;

std::vector<std::string> split(const std::string& line, char separator) {
  std::vector<std::string> cells;
  std::istringstream rest(line);
  for (std::string cell; std::getline(rest, cell, separator);) cells.push_back(cell);
  return cells;
}

std::string from_hexadecimal(const std::string& text) {
  std::string bytes;
  for (std::size_t at = 0; at < text.size(); at += 2) bytes += static_cast<char>(std::stoi(text.substr(at, 2), nullptr, 16));
  return bytes;
}

std::string encoded(const pb::Message& message) {
  std::string bytes;
  {
    pb::io::StringOutputStream stream(&bytes);
    pb::io::CodedOutputStream output(&stream);
    output.SetSerializationDeterministic(true);
    message.SerializeToCodedStream(&output);
  }
  return bytes;
}

// Returns a tensor of elements as text.
v1::Tensor again(v1::DataType dtype, const std::vector<std::string>& parts) {
  std::vector<std::int32_t> narrow;
  std::vector<std::int64_t> wide;
  std::vector<float> floats;
  for (const auto& part : parts) {
    if (dtype == v1::DATA_TYPE_INT32) narrow.push_back(std::stoi(part));
    if (dtype == v1::DATA_TYPE_INT64) wide.push_back(std::stoll(part));
    if (dtype == v1::DATA_TYPE_FLOAT32) {
      const auto bits = static_cast<std::uint32_t>(std::stoul(part, nullptr, 16));
      float value;
      std::memcpy(&value, &bits, sizeof value);
      floats.push_back(value);
    }
  }
  if (dtype == v1::DATA_TYPE_INT32) return client::tensor(narrow);
  return dtype == v1::DATA_TYPE_INT64 ? client::tensor(wide) : client::tensor(floats);
}

// Returns what of a vector is wrong.
std::vector<std::string> faults(std::map<std::string, std::string>& vector) {
  std::vector<std::string> found;
  const std::string wanted = from_hexadecimal(vector["bytes"]);
  const auto* type = pb::DescriptorPool::generated_pool()->FindMessageTypeByName(vector["message"]);
  if (type == nullptr) return {"there is no " + vector["message"]};
  const pb::Message* none = pb::MessageFactory::generated_factory()->GetPrototype(type);
  const std::unique_ptr<pb::Message> decoded(none->New()), read(none->New());
  if (!decoded->ParseFromString(wanted)) return {"it cannot be decoded"};
  if (!pb::util::JsonStringToMessage(vector["values"], read.get()).ok() ||
      !pb::util::MessageDifferencer::Equals(*decoded, *read)) {
    found.push_back("the values differ");
  }
  if (encoded(*decoded) != wanted) found.push_back("the encoded message has other bytes");
  if (const auto* tensor = dynamic_cast<const v1::Tensor*>(decoded.get())) {
    if (client::texts(*tensor, ",") != vector["elements"]) found.push_back("the elements differ");
    if (again(tensor->dtype(), split(vector["elements"], ',')).data() != tensor->data()) {
      found.push_back("a tensor of the elements differs");
    }
  }
  const std::string digest = client::sha256(vector["kind"] + std::string(1, '\0') + wanted);
  if (vector["hash"] != "-" && vector["hash"] != digest) found.push_back("the hash differs");
  return found;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) return 2;
  std::ifstream file(arguments[1]);
  std::string line;
  std::getline(file, line);
  const auto columns = split(line, '\t');
  int num_vectors = 0, num_wrong = 0;
  for (; std::getline(file, line); ++num_vectors) {
    const auto cells = split(line, '\t');
    std::map<std::string, std::string> vector;
    for (std::size_t index = 0; index < columns.size(); ++index) vector[columns[index]] = cells.at(index);
    for (const auto& fault : faults(vector)) {
      std::cerr << vector["name"] << ": " << fault << std::endl;
      ++num_wrong;
    }
  }
  std::cout << num_vectors << " vectors" << std::endl;
  return num_wrong == 0 ? 0 : 1;
}
