// SHA-256 as hexadecimal text.
#pragma once

#include <openssl/sha.h>

#include <cstdio>
#include <string>

namespace tinkerpool_client {

inline std::string sha256(const std::string& bytes) {
  unsigned char digest[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), digest);
  std::string text;
  for (const unsigned char byte : digest) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", byte);
    text += digits;
  }
  return text;
}

}  // namespace tinkerpool_client
