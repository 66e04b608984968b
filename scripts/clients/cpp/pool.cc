#include "pool.h"

#include <algorithm>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <random>
#include <sstream>
#include <thread>

#include "google/rpc/code.pb.h"
#include "google/rpc/status.pb.h"

namespace tinkerpool_client {
namespace {

namespace v1 = tinkerpool::v1;

Details details_of(const grpc::Status& status) {
  Details found;
  google::rpc::Status whole;
  google::rpc::RetryInfo retry;
  whole.ParseFromString(status.error_details());
  for (const auto& detail : whole.details()) {
    if (detail.UnpackTo(&retry)) found.delay_s = retry.retry_delay().seconds() + retry.retry_delay().nanos() / 1e9;
    if (detail.Is<google::rpc::ErrorInfo>()) detail.UnpackTo(&found.info);
  }
  return found;
}

std::string code_name(const grpc::Status& status) {
  return google::rpc::Code_Name(static_cast<google::rpc::Code>(status.error_code()));
}

// Returns whether an error without a reason of the pool's is one of the network, or of a stop of the pool.
bool is_lost(const grpc::Status& status) {
  switch (status.error_code()) {
    case grpc::UNAVAILABLE:
    case grpc::DEADLINE_EXCEEDED:
    case grpc::CANCELLED:
    case grpc::INTERNAL:
      return true;
    default:
      return false;
  }
}

std::shared_ptr<grpc::Channel> connect(const std::string& url, const std::string& trusted) {
  const auto end = url.find("://");
  auto credentials = grpc::InsecureChannelCredentials();
  if (url.substr(0, end) == "https") {
    grpc::SslCredentialsOptions options;
    if (!trusted.empty()) {
      std::ostringstream pem;
      pem << std::ifstream(trusted).rdbuf();
      options.pem_root_certs = pem.str();
    }
    credentials = grpc::SslCredentials(options);
  }
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(64 << 20);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 30000);        // a wait ends when its connection is dead
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2000);  // otherwise up to two minutes between two attempts
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);               // repeated() does that
  return grpc::CreateCustomChannel(url.substr(end + 3), credentials, arguments);
}

}  // namespace

CallError::CallError(const grpc::Status& status)
    : std::runtime_error(code_name(status) + ": " + status.error_message()),
      code_(code_name(status)),
      info_(details_of(status).info) {}

Pool::Pool(const std::string& url, std::string api_key, const std::string& trusted)
    : authorization_("Bearer " + std::move(api_key)),
      channel_(connect(url, trusted)),
      sessions(v1::SessionService::NewStub(channel_)),
      adapters(v1::AdapterService::NewStub(channel_)),
      training(v1::TrainingService::NewStub(channel_)),
      operations(v1::OperationService::NewStub(channel_)),
      checkpoints(v1::CheckpointService::NewStub(channel_)),
      sampling(v1::SamplingService::NewStub(channel_)) {}

void Pool::repeated(const std::string& name, const std::function<grpc::Status(grpc::ClientContext*)>& attempt) {
  std::mt19937 random(std::random_device{}());
  std::uniform_real_distribution<double> vary(1, 1.25);
  for (double pause_s = 0.2;; pause_s = std::min(2 * pause_s, 2.0)) {
    grpc::ClientContext context;
    context.AddMetadata("authorization", authorization_);
    const grpc::Status status = attempt(&context);
    if (status.ok()) return;
    const Details details = details_of(status);
    if (!details.delay_s && !(details.info.reason().empty() && is_lost(status))) throw CallError(status);
    const double wait_s = details.delay_s.value_or(pause_s) * vary(random);
    std::ostringstream line;
    line << name << ": " << (details.info.reason().empty() ? code_name(status) : details.info.reason())
         << "; again in " << std::fixed << std::setprecision(1) << wait_s << " s\n";
    std::cerr << line.str();
    std::this_thread::sleep_for(std::chrono::duration<double>(wait_s));
  }
}

std::map<std::string, v1::Operation> Pool::finished(const std::vector<std::string>& names) {
  std::map<std::string, v1::Operation> found;
  repeated("WaitOperations", [&](grpc::ClientContext* context) {
    v1::WaitOperationsRequest request;
    for (const auto& name : names) {
      if (found.count(name) == 0) request.add_names(name);
    }
    const auto stream = operations->WaitOperations(context, request);
    for (v1::WaitOperationsResponse response; stream->Read(&response);) {
      const v1::Operation& operation = response.operation();
      if (operation.state() == v1::OPERATION_STATE_FAILED) {
        throw std::runtime_error(operation.name() + ": " + operation.error().message());
      }
      found[operation.name()] = operation;
    }
    return stream->Finish();
  });
  return found;
}

}  // namespace tinkerpool_client
