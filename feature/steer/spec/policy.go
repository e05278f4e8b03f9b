// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/strictyaml"
	"go.yaml.in/yaml/v3"
)

// Policies besides BySource and ByQUIC.
const (
	ByDevice Policy = "device" // like source, but all addresses of a device count as one: see Options.Devices
	ByFlow   Policy = "flow"   // addresses, ports and protocol
	ByPacket Policy = "packet" // each CPU distributes its packets in turn
	ByCPU    Policy = "cpu"    // slot = number of the receiving CPU modulo slots
)

// Policies are the policies, indexed by enum steer_policy.
var Policies = []Policy{BySource, ByDevice, ByFlow, ByPacket, ByCPU, ByQUIC}

// KeepsDevices reports whether the policy keeps all traffic of a device in one slot. Only such devices can be moved, or
// be found split.
func (p Policy) KeepsDevices() bool { return p == BySource || p == ByDevice }

// onEmpty returns the policy's default action of an empty slot. With a collector per router, no other collector should
// get the traffic. With other policies any member serves, so a loss of one packet in N is needless.
func (p Policy) onEmpty() OnEmpty {
	if p.KeepsDevices() {
		return Reject
	}
	return Next
}

// QUIC describes the server number in connection ids (by: quic).
type QUIC struct {
	Format         QUICFormat `yaml:"format" json:"format"`
	ServerIDLength int        `yaml:"server_id_length" json:"server_id_length,omitempty"` // bytes, 1 to 4: quic-lb
}

// QUICFormat is the format of connection ids.
type QUICFormat string

// Formats of connection ids.
const (
	// QUICNginx is nginx's quic_bpf (nginx -V shows --with-http_v3_module): the first eight bytes are SO_COOKIE of the
	// worker's socket, big endian.
	QUICNginx QUICFormat = "nginx"
	// QUICLB is draft-ietf-quic-load-balancers in clear: the first byte is followed by the slot number in
	// ServerIDLength bytes, big endian.
	QUICLB QUICFormat = "quic-lb"
)

// QUICFormats are the formats of connection ids, indexed by enum steer_quic.
var QUICFormats = []QUICFormat{QUICNginx, QUICLB}

// UnmarshalText implements encoding.TextUnmarshaler.
func (f *QUICFormat) UnmarshalText(b []byte) error {
	return strictyaml.Choice(f, b, "format of connection ids", QUICFormats...)
}

// Weights are the slots' shares of the buckets, by slot. The default weight is 1. A slot of weight 0 gets no bucket.
type Weights map[int]int

const maxWeight = 1000

// UnmarshalNode implements strictyaml.Node. The form is {0: 2, 3: 1}.
func (w *Weights) UnmarshalNode(n *yaml.Node, d *strictyaml.Decoder) error {
	var m map[string]int
	if err := d.Decode(n, &m); err != nil {
		return err
	}
	*w = Weights{}
	for k, v := range m {
		slot, err := strconv.Atoi(k)
		if err != nil {
			return d.Errorf(n, "", "slot %q: want slot: weight, like {0: 2, 3: 1}", k)
		}
		if _, ok := (*w)[slot]; ok { // written as 1 and 01
			return d.Errorf(n, "", "slot %d has two weights", slot)
		}
		(*w)[slot] = v
	}
	return nil
}

// String formats the weights for plans.
func (w Weights) String() string {
	if len(w) == 0 {
		return "equal"
	}
	slots := make([]int, 0, len(w))
	for s := range w {
		slots = append(slots, s)
	}
	slices.Sort(slots)
	out := make([]string, len(slots))
	for i, s := range slots {
		out[i] = fmt.Sprintf("%d: %d", s, w[s])
	}
	return strings.Join(out, ", ")
}

// Rate is a number of resets per second; 0 disables them.
type Rate = feature.Rate

// DefaultResetRate protects collectors from a storm of reconnects: 512 routers take two minutes.
const DefaultResetRate Rate = 5

// policyDefaults returns s with defaults for the omitted options of its policy.
func (s Service) policyDefaults() Service {
	if s.ResetRate == nil {
		r := DefaultResetRate
		s.ResetRate = &r
	}
	if s.By == ByQUIC && (s.QUIC == nil || s.QUIC.Format == "") {
		q := QUIC{Format: QUICNginx}
		if s.QUIC != nil {
			q.ServerIDLength = s.QUIC.ServerIDLength
		}
		if q.ServerIDLength != 0 {
			q.Format = QUICLB
		}
		s.QUIC = &q
	}
	if s.QUIC != nil && s.QUIC.Format == QUICLB && s.QUIC.ServerIDLength == 0 {
		s.QUIC = &QUIC{Format: QUICLB, ServerIDLength: 1}
	}
	return s
}

// validatePolicy checks the options of policies.
func (s Service) validatePolicy(fail func(string, ...any)) {
	switch {
	case s.By == ByQUIC && s.Engine == EngineSkLookup:
		fail("by: quic reads connection ids, but engine sk_lookup sees only addresses and ports: use engine sk_reuseport")
	case s.By != ByQUIC && s.QUIC != nil:
		fail("quic needs by: quic, not by: %s", s.By)
	case s.QUIC != nil && s.QUIC.Format == QUICNginx && s.QUIC.ServerIDLength != 0:
		fail("quic.server_id_length needs format: quic-lb: nginx's connection ids contain a socket cookie of eight bytes")
	case s.QUIC != nil && (s.QUIC.ServerIDLength < 0 || s.QUIC.ServerIDLength > 4):
		fail("quic.server_id_length %d: want bytes, from 1 to 4", s.QUIC.ServerIDLength)
	case s.By == ByCPU && len(s.Weights) > 0:
		fail("weights: by: cpu has no buckets: the slot is the number of the CPU modulo slots")
	}
	s.validateWeights(fail)
	switch {
	case s.By != ByDevice && s.Devices != "":
		fail("devices needs by: device, not by: %s", s.By)
	case s.By == ByDevice && s.Devices == "":
		fail("by: device needs a file with the devices' addresses: devices: FILE, with lines like \"edge1 192.0.2.1 2001:db8::1\"")
	case s.By == ByDevice:
		if _, err := LoadDevices(s.Devices); err != nil {
			fail("devices: %w", err)
		}
	}
}

func (s Service) validateWeights(fail func(string, ...any)) {
	total := max(0, s.Slots-len(s.Weights))
	for slot, w := range s.Weights {
		if slot < 0 || slot >= s.Slots {
			fail("weights: slot %d: there are slots 0 to %d", slot, s.Slots-1)
		}
		if w < 0 || w > maxWeight {
			fail("weights: slot %d has weight %d: want a number from 0 to %d", slot, w, maxWeight)
		}
		total += w
	}
	if s.Slots > 0 && total == 0 {
		fail("weights: all are 0: set at least one above 0")
	}
}
