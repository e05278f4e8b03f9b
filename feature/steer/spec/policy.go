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

// Policies beside BySource.
const (
	ByDevice Policy = "device" // as source, but all addresses of a device are one: Options.Devices names them
	ByFlow   Policy = "flow"   // addresses, ports and protocol
	ByPacket Policy = "packet" // every CPU deals its packets out in turn
	ByCPU    Policy = "cpu"    // the slot of the number of the receiving CPU, modulo slots
)

// Policies are the policies by the number that the programs use.
var Policies = []Policy{BySource, ByDevice, ByFlow, ByPacket, ByCPU, ByQUIC} // index: enum steer_policy

// KeepsDevices says whether a policy keeps all traffic of a device at one slot,
// so that a device can be moved, and be found split.
func (p Policy) KeepsDevices() bool { return p == BySource || p == ByDevice }

// onEmpty is the default for what an empty slot does. Who wants every protocol of
// a router at one collector wants no other to have it; where any member will do,
// refusing one packet in N would be silly.
func (p Policy) onEmpty() OnEmpty {
	if p.KeepsDevices() {
		return Reject
	}
	return Next
}

// QUIC says how servers write their own number into the connection ids that they
// choose (by: quic).
type QUIC struct {
	Format         QUICFormat `yaml:"format" json:"format"`
	ServerIDLength int        `yaml:"server_id_length" json:"server_id_length,omitempty"` // bytes, 1 to 4: quic-lb
}

// QUICFormat is the form of connection ids.
type QUICFormat string

// Formats of connection ids.
const (
	// QUICNginx is nginx's quic_bpf (nginx -V shows --with-http_v3_module): the
	// first eight bytes are SO_COOKIE of the worker's socket, big endian.
	QUICNginx QUICFormat = "nginx"
	// QUICLB is draft-ietf-quic-load-balancers in clear: after the first byte,
	// ServerIDLength bytes are the number of the slot, big endian.
	QUICLB QUICFormat = "quic-lb"
)

// QUICFormats are the formats of connection ids by the number that the programs use.
var QUICFormats = []QUICFormat{QUICNginx, QUICLB} // index: enum steer_quic

// UnmarshalText implements encoding.TextUnmarshaler.
func (f *QUICFormat) UnmarshalText(b []byte) error {
	return strictyaml.Choice(f, b, "format of connection ids", QUICFormats...)
}

// Weights are slots' shares of the buckets, by slot. A slot that is not named has
// weight 1; one of weight 0 gets no bucket.
type Weights map[int]int

const maxWeight = 1000

// UnmarshalNode implements strictyaml.Node: {0: 2, 3: 1}.
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
		if _, ok := (*w)[slot]; ok { // 1 and 01
			return d.Errorf(n, "", "slot %d has two weights", slot)
		}
		(*w)[slot] = v
	}
	return nil
}

// String is what plans show.
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

// Rate is a number of resets a second; 0 is none at all.
type Rate = feature.Rate

// DefaultResetRate keeps collectors from a storm of sessions that all return at
// once: 512 routers take two minutes.
const DefaultResetRate Rate = 5

// policyDefaults fills in what the options of policies leave out.
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

// validatePolicy checks the options that go with policies.
func (s Service) validatePolicy(fail func(string, ...any)) {
	switch {
	case s.By == ByQUIC && s.Engine == EngineSkLookup:
		fail("by: quic reads connection ids, and engine sk_lookup sees addresses and ports only, not the packet: use engine sk_reuseport")
	case s.By != ByQUIC && s.QUIC != nil:
		fail("quic goes with by: quic, not with by: %s", s.By)
	case s.QUIC != nil && s.QUIC.Format == QUICNginx && s.QUIC.ServerIDLength != 0:
		fail("quic.server_id_length goes with format: quic-lb: connection ids of nginx hold a socket's cookie, of eight bytes")
	case s.QUIC != nil && (s.QUIC.ServerIDLength < 0 || s.QUIC.ServerIDLength > 4):
		fail("quic.server_id_length %d: want bytes, from 1 to 4", s.QUIC.ServerIDLength)
	case s.By == ByCPU && len(s.Weights) > 0:
		fail("weights: by: cpu has no buckets to share out: the slot is the number of the CPU, modulo slots")
	}
	s.validateWeights(fail)
	switch {
	case s.By != ByDevice && s.Devices != "":
		fail("devices goes with by: device, not with by: %s", s.By)
	case s.By == ByDevice && s.Devices == "":
		fail("by: device needs the file that says which addresses a device has: devices: FILE, with lines like \"edge1 192.0.2.1 2001:db8::1\"")
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
		fail("weights: all are 0, so nobody would get anything")
	}
}
