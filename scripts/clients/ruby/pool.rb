# frozen_string_literal: true

# A connection to a pool: stubs, the key in the metadata, and calls that are repeated.

require 'uri'
require 'google/protobuf/well_known_types'
require 'google/rpc/error_details_pb'
require 'google/rpc/status_pb'
%w[sessions adapters training operations checkpoints sampling].each { |name| require "tinkerpool/v1/#{name}_services_pb" }

# Calls of one pool. A service's stub is a method: pool.sessions, pool.adapters, ...
class Pool
  include Tinkerpool::V1

  CALL_S = 30
  # Errors of a call that the network or a stop of the pool ended: without a reason of the pool's.
  LOST = [GRPC::Unavailable, GRPC::DeadlineExceeded, GRPC::Cancelled, GRPC::Internal].freeze
  # Pings keep a wait from hanging on a dead connection. Without the bound a channel waits up to two minutes between two
  # attempts to reach a pool that restarts. The library's own retries would add to those made here.
  CHANNEL = {
    'grpc.max_receive_message_length' => 64 << 20,
    'grpc.keepalive_time_ms' => 30_000,
    'grpc.max_reconnect_backoff_ms' => 2000,
    'grpc.enable_retries' => 0
  }.freeze

  attr_reader :sessions, :adapters, :training, :operations, :checkpoints, :sampling

  # `url`: http://host:port, or https:// for TLS. `trusted`: a PEM file; by default the authorities of this machine.
  def initialize(url, api_key, trusted = nil)
    address = URI(url)
    @metadata = { 'authorization' => "Bearer #{api_key}" }
    credentials = :this_channel_is_insecure
    credentials = GRPC::Core::ChannelCredentials.new(*[trusted && File.read(trusted)].compact) if address.scheme == 'https'
    @sessions, @adapters, @training, @operations, @checkpoints, @sampling =
      [SessionService, AdapterService, TrainingService, OperationService, CheckpointService, SamplingService].map do |service|
        service::Stub.new("#{address.host}:#{address.port}", credentials, channel_args: CHANNEL)
      end
  end

  # Makes one call, and repeats it. The same request again is safe: it has a seq or a request id, or changes nothing.
  def call(stub, method, request)
    repeated(method) { stub.public_send(method, request, metadata: @metadata, deadline: Time.now + CALL_S) }
  end

  # Returns what the block makes of a stream's messages; begins again after a broken one.
  def stream(stub, method, request)
    repeated(method) { yield stub.public_send(method, request, metadata: @metadata) }
  end

  # Returns the named operations, by name, when all are finished. After a broken stream it asks for what is missing.
  def finished(names)
    found = {}
    repeated(:wait_operations) do
      request = WaitOperationsRequest.new(names: names - found.keys)
      @operations.wait_operations(request, metadata: @metadata).each do |response|
        operation = response.operation
        error = operation.error
        raise "#{operation.name}: #{error.reason}: #{error.message}" if operation.state == :OPERATION_STATE_FAILED

        found[operation.name] = operation
      end
    end
    found
  end

  # Returns why a call was refused, and the delay after which it may succeed; nil: it will not.
  def self.details(error)
    bytes = error.metadata['grpc-status-details-bin']
    info = Google::Rpc::ErrorInfo.new
    delay_s = nil
    (bytes ? Google::Rpc::Status.decode(bytes).details : []).each do |detail|
      info = detail.unpack(Google::Rpc::ErrorInfo) if detail.is(Google::Rpc::ErrorInfo)
      next unless detail.is(Google::Rpc::RetryInfo)

      delay = detail.unpack(Google::Rpc::RetryInfo).retry_delay
      delay_s = delay.seconds + delay.nanos / 1e9
    end
    [info, delay_s]
  end

  # Returns the name of an error's code as the contract writes it: INVALID_ARGUMENT.
  def self.code_name(error)
    GRPC::Core::StatusCodes.constants.find { |name| GRPC::Core::StatusCodes.const_get(name) == error.code }.to_s
  end

  private

  # Attempts until it succeeds: after the delay that a refusal tells, or growing pauses without a connection.
  def repeated(method)
    name = method.to_s.split('_').map(&:capitalize).join
    pause_s = 0.2
    begin
      yield
    rescue GRPC::BadStatus => e
      info, delay_s = Pool.details(e)
      raise if delay_s.nil? && !(info.reason.empty? && LOST.include?(e.class))

      wait_s = (delay_s || pause_s) * rand(1.0..1.25)
      warn format('%s: %s; again in %.1f s', name, info.reason.empty? ? Pool.code_name(e) : info.reason, wait_s)
      sleep wait_s
      pause_s = [2 * pause_s, 2].min
      retry
    end
  end
end
