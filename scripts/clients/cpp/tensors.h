// Tensors: bytes with dtype and shape. The bytes are little-endian, as the machine that this runs on has to be.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "tinkerpool/v1/types.pb.h"

namespace tinkerpool_client {

inline tinkerpool::v1::DataType dtype_of(std::int32_t) { return tinkerpool::v1::DATA_TYPE_INT32; }
inline tinkerpool::v1::DataType dtype_of(std::int64_t) { return tinkerpool::v1::DATA_TYPE_INT64; }
inline tinkerpool::v1::DataType dtype_of(float) { return tinkerpool::v1::DATA_TYPE_FLOAT32; }

// Returns numbers as a tensor of one dimension.
template <typename Number>
tinkerpool::v1::Tensor tensor(const std::vector<Number>& values) {
  tinkerpool::v1::Tensor made;
  made.set_data(values.data(), sizeof(Number) * values.size());
  made.set_dtype(dtype_of(Number()));
  made.add_shape(static_cast<std::int64_t>(values.size()));
  return made;
}

// Returns the elements of a tensor; Number is the type that its dtype says, or has its size.
template <typename Number>
std::vector<Number> elements(const tinkerpool::v1::Tensor& tensor) {
  std::vector<Number> found(tensor.data().size() / sizeof(Number));
  std::memcpy(found.data(), tensor.data().data(), sizeof(Number) * found.size());
  return found;
}

// Returns the elements of a tensor as text: integers in decimal, floats as their bits in hexadecimal.
inline std::string texts(const tinkerpool::v1::Tensor& tensor, const std::string& separator) {
  std::string text;
  const auto add = [&](const std::string& element) { text += (text.empty() ? "" : separator) + element; };
  switch (tensor.dtype()) {
    case tinkerpool::v1::DATA_TYPE_INT32:
      for (const auto element : elements<std::int32_t>(tensor)) add(std::to_string(element));
      break;
    case tinkerpool::v1::DATA_TYPE_INT64:
      for (const auto element : elements<std::int64_t>(tensor)) add(std::to_string(element));
      break;
    default:
      for (const auto bits : elements<std::uint32_t>(tensor)) {
        char element[9];
        std::snprintf(element, sizeof element, "%08x", bits);
        add(element);
      }
  }
  return text;
}

}  // namespace tinkerpool_client
