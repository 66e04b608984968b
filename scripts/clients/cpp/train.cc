// Trains an adapter, samples from it and exports it. Prints results; floats also as the bits that the contract carries.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <iostream>
#include <random>

#include "hashes.h"
#include "pool.h"
#include "tensors.h"

namespace {

namespace v1 = tinkerpool::v1;
using tinkerpool_client::Pool;
using tinkerpool_client::tensor;
using tinkerpool_client::texts;

const std::vector<std::int32_t> kTokens = {459, 342, 343, 386, 505, 351, 77, 260};
const std::vector<float> kWeights = {1, 0.5, 0.25, 1, 0.5, 0.25, 1};
constexpr int kNumSteps = 10;
constexpr int kNumEarly = 6;

v1::Tensor tokens(std::size_t begin, std::size_t end) {
  return tensor(std::vector<std::int32_t>(kTokens.begin() + begin, kTokens.begin() + end));
}

unsigned long long bits(double value) {
  std::uint64_t found;
  std::memcpy(&found, &value, sizeof found);
  return found;
}

std::string new_id() {
  std::random_device random;
  return std::to_string(random()) + "-" + std::to_string(random()) + "-" + std::to_string(random());
}

// Takes the steps, all of them in flight at a time, and prints what they gave.
void train(Pool& pool, const std::string& adapter_id) {
  const auto send = [&](int step) {
    v1::TrainStepRequest request;
    request.set_adapter_id(adapter_id);
    request.set_seq(2 * step - 1);
    v1::Datum& datum = *request.add_data();
    *datum.mutable_tokens() = tokens(0, kTokens.size() - 1);
    auto& inputs = *datum.mutable_loss_inputs();
    inputs["target_tokens"] = tokens(1, kTokens.size());
    inputs["weights"] = tensor(kWeights);
    request.set_loss_function(v1::LOSS_FUNCTION_CROSS_ENTROPY);
    request.mutable_adam()->set_learning_rate(2e-3);
    const auto sent = pool.call("TrainStep", pool.training, &v1::TrainingService::Stub::TrainStep, request);
    return std::vector<std::string>{sent.forward_backward().name(), sent.optim_step().name()};
  };

  // The pool takes steps in any order and runs them by seq: sent last first, none can finish before the first is sent.
  std::vector<std::string> early, late;
  for (int step = kNumSteps; step > kNumSteps - kNumEarly; --step) {
    for (const auto& name : send(step)) early.push_back(name);
  }
  auto waiting = std::async(std::launch::async, [&] { return pool.finished(early); });
  std::cout << "sent " << kNumEarly << " steps" << std::endl;
  for (int step = kNumSteps - kNumEarly; step > 0; --step) {
    for (const auto& name : send(step)) late.push_back(name);
  }
  auto results = waiting.get();
  results.merge(pool.finished(late));
  if (send(kNumSteps)[0] != early[0]) throw std::runtime_error("the same seq again gave another operation");
  for (int step = 1; step <= kNumSteps; ++step) {
    const auto& forward = results.at(adapter_id + ":" + std::to_string(2 * step - 1)).forward_backward();
    const double norm = results.at(adapter_id + ":" + std::to_string(2 * step)).optim_step().metrics().at("grad_norm:last");
    const double loss = forward.metrics().at("loss:sum");
    std::printf("step %d loss %.4f %016llx grad_norm %016llx\n", step, loss, bits(loss), bits(norm));
    std::printf("step %d logprobs %s\n", step, texts(forward.logprobs(0), " ").c_str());
  }
}

// Samples with a stream, and prints the sequences.
void sample(Pool& pool, const std::string& sampler_id) {
  v1::StreamSampleRequest stream_request;
  v1::SampleRequest& request = *stream_request.mutable_request();
  request.set_sampler_id(sampler_id);
  request.set_seq(1);
  *request.mutable_prompt() = tokens(0, 3);
  request.set_num_samples(2);
  request.mutable_params()->set_max_tokens(8);
  request.mutable_params()->set_temperature(0.75f);
  request.mutable_params()->set_seed(11);
  request.mutable_params()->mutable_stop();
  std::map<int, std::string> streamed;
  v1::SampleResult result;
  pool.repeated("StreamSample", [&](grpc::ClientContext* context) {
    streamed.clear();
    const auto stream = pool.sampling->StreamSample(context, stream_request);
    for (v1::StreamSampleResponse event; stream->Read(&event);) {
      if (event.has_token()) {
        std::string& drawn = streamed[event.token().sequence_index()];
        drawn += (drawn.empty() ? "" : " ") + std::to_string(event.token().token());
      }
      result = event.operation().sample();
    }
    return stream->Finish();
  });
  for (int index = 0; index < result.sequences_size(); ++index) {
    const std::string drawn = texts(result.sequences(index).tokens(), " ");
    if (streamed[index] != drawn) throw std::runtime_error(streamed[index] + " was streamed; the result is " + drawn);
    std::printf("sample %d tokens %s\n", index, drawn.c_str());
    std::printf("sample %d logprobs %s\n", index, texts(result.sequences(index).logprobs(), " ").c_str());
  }
}

std::string from_environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace

// Catches nothing: an error ends the program at once, also while another thread waits.
int main() {
  Pool pool(from_environment("TINKERPOOL_BASE_URL"), from_environment("TINKERPOOL_API_KEY"),
            from_environment("TINKERPOOL_CERTIFICATE"));
  const auto models =
      pool.call("GetCapabilities", pool.sessions, &v1::SessionService::Stub::GetCapabilities, v1::GetCapabilitiesRequest());
  const std::string base_model = models.base_models(0).name();
  std::printf("model %s\n", base_model.c_str());
  // A session ends ten minutes after its last heartbeat: this program sends none, and finishes before that.
  v1::CreateSessionRequest new_session;
  new_session.set_request_id(new_id());
  const auto session = pool.call("CreateSession", pool.sessions, &v1::SessionService::Stub::CreateSession, new_session);
  const std::string session_id = session.session().session_id();
  v1::CreateAdapterRequest new_adapter;
  new_adapter.set_session_id(session_id);
  new_adapter.set_request_id(new_id());
  new_adapter.set_base_model(base_model);
  new_adapter.set_rank(3);
  new_adapter.set_seed(7);
  const auto create_adapter = [&] {
    return pool.call("CreateAdapter", pool.adapters, &v1::AdapterService::Stub::CreateAdapter, new_adapter);
  };
  try {
    create_adapter();
  } catch (const tinkerpool_client::CallError& error) {
    std::printf("refused %s %s %s\n", error.code().c_str(), error.info().reason().c_str(), error.info().domain().c_str());
  }
  new_adapter.set_rank(8);
  const std::string adapter_id = create_adapter().adapter().adapter_id();

  train(pool, adapter_id);

  v1::SaveStateRequest save_state;
  save_state.set_adapter_id(adapter_id);
  save_state.set_seq(2 * kNumSteps + 1);
  save_state.set_name("state");
  const auto state = pool.call("SaveState", pool.checkpoints, &v1::CheckpointService::Stub::SaveState, save_state);
  v1::SaveWeightsForSamplerRequest save_weights;
  save_weights.set_adapter_id(adapter_id);
  save_weights.set_seq(2 * kNumSteps + 2);
  save_weights.set_name("final");
  const auto weights = pool.call("SaveWeightsForSampler", pool.checkpoints,
                                 &v1::CheckpointService::Stub::SaveWeightsForSampler, save_weights);
  auto saved = pool.finished({state.operation().name(), weights.operation().name()});
  const std::string path = saved[weights.operation().name()].save_weights_for_sampler().path();
  v1::CreateSamplerRequest new_sampler;
  new_sampler.set_session_id(session_id);
  new_sampler.set_request_id(new_id());
  new_sampler.set_model_path(path);
  sample(pool, pool.call("CreateSampler", pool.sampling, &v1::SamplingService::Stub::CreateSampler, new_sampler)
                   .sampler()
                   .sampler_id());

  v1::ExportCheckpointRequest export_request;
  export_request.set_path(path);
  std::string archive;
  pool.repeated("ExportCheckpoint", [&](grpc::ClientContext* context) {
    archive.clear();
    const auto stream = pool.checkpoints->ExportCheckpoint(context, export_request);
    for (v1::ExportCheckpointResponse piece; stream->Read(&piece);) archive += piece.data();
    return stream->Finish();
  });
  std::printf("export %zu bytes sha256 %s\n", archive.size(), tinkerpool_client::sha256(archive).c_str());
  v1::ListCheckpointsRequest listing;
  listing.set_adapter_id(adapter_id);
  const auto listed =
      pool.call("ListCheckpoints", pool.checkpoints, &v1::CheckpointService::Stub::ListCheckpoints, listing);
  for (const auto& found : listed.checkpoints()) {
    const std::string name = found.path().substr(std::strlen("tinker://") + adapter_id.size() + 1);
    std::printf("checkpoint %s seq %lld rank %d sha256 %s\n", name.c_str(), static_cast<long long>(found.seq()),
                found.rank(), found.sha256().c_str());
  }
  v1::FinishSessionRequest end;
  end.set_session_id(session_id);
  pool.call("FinishSession", pool.sessions, &v1::SessionService::Stub::FinishSession, end);
  std::printf("done\n");
}
