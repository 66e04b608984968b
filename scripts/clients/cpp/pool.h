// A connection to a pool: stubs, the key in the metadata, and calls that are repeated.
#pragma once

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "google/rpc/error_details.pb.h"
#include "tinkerpool/v1/adapters.grpc.pb.h"
#include "tinkerpool/v1/checkpoints.grpc.pb.h"
#include "tinkerpool/v1/operations.grpc.pb.h"
#include "tinkerpool/v1/sampling.grpc.pb.h"
#include "tinkerpool/v1/sessions.grpc.pb.h"
#include "tinkerpool/v1/training.grpc.pb.h"

namespace tinkerpool_client {

constexpr auto kCallTimeout = std::chrono::seconds(30);

// Why a call was refused, and the seconds after which it may succeed; none: it will not.
struct Details {
  google::rpc::ErrorInfo info;
  std::optional<double> delay_s;
};

// A call that ended in an error, and is not repeated.
class CallError : public std::runtime_error {
 public:
  explicit CallError(const grpc::Status& status);

  const std::string& code() const { return code_; }
  const google::rpc::ErrorInfo& info() const { return info_; }

 private:
  std::string code_;
  google::rpc::ErrorInfo info_;
};

class Pool {
 public:
  // `url`: http://host:port, or https:// for TLS. `trusted`: a PEM file; empty: the authorities of this machine.
  Pool(const std::string& url, std::string api_key, const std::string& trusted);

  // Makes a call of a stub. The same request again is safe: it has a seq or a request_id, or changes nothing.
  template <typename Stub, typename Request, typename Response>
  Response call(const std::string& name, const std::unique_ptr<Stub>& stub,
                grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*), const Request& request) {
    Response response;
    repeated(name, [&](grpc::ClientContext* context) {
      context->set_deadline(std::chrono::system_clock::now() + kCallTimeout);
      return (stub.get()->*method)(context, request, &response);
    });
    return response;
  }

  // Attempts until it succeeds: after the delay that a refusal tells, or growing pauses without a connection. Each
  // attempt has a context of its own, which has the key. Throws CallError.
  void repeated(const std::string& name, const std::function<grpc::Status(grpc::ClientContext*)>& attempt);

  // Waits for operations over a stream, and returns them by name. After a broken stream asks for what is missing.
  std::map<std::string, tinkerpool::v1::Operation> finished(const std::vector<std::string>& names);

 private:
  std::string authorization_;
  std::shared_ptr<grpc::Channel> channel_;

 public:
  std::unique_ptr<tinkerpool::v1::SessionService::Stub> sessions;
  std::unique_ptr<tinkerpool::v1::AdapterService::Stub> adapters;
  std::unique_ptr<tinkerpool::v1::TrainingService::Stub> training;
  std::unique_ptr<tinkerpool::v1::OperationService::Stub> operations;
  std::unique_ptr<tinkerpool::v1::CheckpointService::Stub> checkpoints;
  std::unique_ptr<tinkerpool::v1::SamplingService::Stub> sampling;
};

}  // namespace tinkerpool_client
