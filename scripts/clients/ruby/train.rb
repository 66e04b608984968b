# frozen_string_literal: true

# Trains an adapter, samples from it and exports it. Prints results; floats also as the bits that the contract carries.

require 'digest'
require 'securerandom'
require_relative 'pool'
require_relative 'tensors'

include Tinkerpool::V1 # rubocop:disable Style/MixinUsage

TOKENS = [459, 342, 343, 386, 505, 351, 77, 260].freeze
WEIGHTS = [1, 0.5, 0.25, 1, 0.5, 0.25, 1].freeze
NUM_STEPS = 10
NUM_EARLY = 6

def int32(values) = Tensors.tensor(:DATA_TYPE_INT32, values)
def bits32(tensor) = Tensors.texts(tensor).join(' ')
def bits64(value) = format('%016x', [value].pack('G').unpack1('Q>'))

# Takes the steps, all of them in flight at a time, and prints what they gave.
def train(pool, adapter_id)
  inputs = { 'target_tokens' => int32(TOKENS[1..]), 'weights' => Tensors.tensor(:DATA_TYPE_FLOAT32, WEIGHTS) }
  datum = Datum.new(tokens: int32(TOKENS[...-1]), loss_inputs: inputs)
  send = lambda do |step|
    request = TrainStepRequest.new(
      adapter_id: adapter_id, seq: 2 * step - 1, data: [datum], loss_function: :LOSS_FUNCTION_CROSS_ENTROPY,
      adam: AdamParams.new(learning_rate: 2e-3)
    )
    sent = pool.call(pool.training, :train_step, request)
    [sent.forward_backward.name, sent.optim_step.name]
  end

  # The pool takes steps in any order and runs them by seq: sent last first, none can finish before the first is sent.
  order = NUM_STEPS.downto(1).to_a
  early = order.take(NUM_EARLY).flat_map(&send)
  waiting = Thread.new { pool.finished(early) }
  waiting.report_on_exception = false
  puts "sent #{NUM_EARLY} steps"
  late = order.drop(NUM_EARLY).flat_map(&send)
  results = waiting.value.merge(pool.finished(late))
  raise 'the same seq again gave another operation' if send.call(NUM_STEPS) != early.take(2)

  (1..NUM_STEPS).each do |step|
    forward = results["#{adapter_id}:#{2 * step - 1}"].forward_backward
    norm = results["#{adapter_id}:#{2 * step}"].optim_step.metrics['grad_norm:last']
    loss = forward.metrics['loss:sum']
    puts format('step %d loss %.4f %s grad_norm %s', step, loss, bits64(loss), bits64(norm))
    puts "step #{step} logprobs #{bits32(forward.logprobs[0])}"
  end
end

# Samples with a stream, and prints the sequences.
def sample(pool, sampler_id)
  params = SamplingParams.new(max_tokens: 8, temperature: 0.75, seed: 11, stop: StopCondition.new)
  request = SampleRequest.new(sampler_id: sampler_id, seq: 1, prompt: int32(TOKENS.take(3)), num_samples: 2, params: params)
  streamed = nil
  operation = pool.stream(pool.sampling, :stream_sample, StreamSampleRequest.new(request: request)) do |events|
    streamed = Hash.new { |drawn, index| drawn[index] = [] }
    last = nil
    events.each do |event|
      streamed[event.token.sequence_index] << event.token.token.to_s if event.token
      last = event.operation
    end
    last
  end
  operation.sample.sequences.each_with_index do |sequence, index|
    drawn = Tensors.texts(sequence.tokens)
    raise "#{streamed[index]} was streamed, and #{drawn} is the result" if streamed[index] != drawn

    puts "sample #{index} tokens #{drawn.join(' ')}"
    puts "sample #{index} logprobs #{bits32(sequence.logprobs)}"
  end
end

$stdout.sync = true
pool = Pool.new(ENV.fetch('TINKERPOOL_BASE_URL'), ENV.fetch('TINKERPOOL_API_KEY'), ENV['TINKERPOOL_CERTIFICATE'])
base_model = pool.call(pool.sessions, :get_capabilities, GetCapabilitiesRequest.new).base_models[0].name
puts "model #{base_model}"
# A session ends ten minutes after its last heartbeat: this program sends none, and finishes before that.
request = CreateSessionRequest.new(request_id: SecureRandom.uuid)
session_id = pool.call(pool.sessions, :create_session, request).session.session_id
request = CreateAdapterRequest.new(
  session_id: session_id, request_id: SecureRandom.uuid, base_model: base_model, rank: 3, seed: 7
)
begin
  pool.call(pool.adapters, :create_adapter, request)
rescue GRPC::BadStatus => e
  info, = Pool.details(e)
  puts "refused #{Pool.code_name(e)} #{info.reason} #{info.domain}"
end
request.rank = 8
adapter_id = pool.call(pool.adapters, :create_adapter, request).adapter.adapter_id

train(pool, adapter_id)

seq = 2 * NUM_STEPS + 1
request = SaveStateRequest.new(adapter_id: adapter_id, seq: seq, name: 'state')
state = pool.call(pool.checkpoints, :save_state, request).operation.name
request = SaveWeightsForSamplerRequest.new(adapter_id: adapter_id, seq: seq + 1, name: 'final')
weights = pool.call(pool.checkpoints, :save_weights_for_sampler, request).operation.name
path = pool.finished([state, weights])[weights].save_weights_for_sampler.path
request = CreateSamplerRequest.new(session_id: session_id, request_id: SecureRandom.uuid, model_path: path)
sample(pool, pool.call(pool.sampling, :create_sampler, request).sampler.sampler_id)

request = ExportCheckpointRequest.new(path: path)
archive = pool.stream(pool.checkpoints, :export_checkpoint, request) { |pieces| pieces.map(&:data).join }
puts "export #{archive.bytesize} bytes sha256 #{Digest::SHA256.hexdigest(archive)}"
request = ListCheckpointsRequest.new(adapter_id: adapter_id)
pool.call(pool.checkpoints, :list_checkpoints, request).checkpoints.each do |found|
  name = found.path.delete_prefix("tinker://#{adapter_id}/")
  puts "checkpoint #{name} seq #{found.seq} rank #{found.rank} sha256 #{found.sha256}"
end
pool.call(pool.sessions, :finish_session, FinishSessionRequest.new(session_id: session_id))
puts 'done'
