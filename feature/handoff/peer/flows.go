// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"time"

	"github.com/weir-project/weir/feature/handoff/move"
)

// FlowRecord is a load balancer's report of a flow to its partner, or a backend's report of a
// session to a load balancer.
type FlowRecord struct {
	Flow  Flow
	Owner move.Backend // 0 in a backend's report: the backend itself
	// To is the backend about to acquire the flow, or 0. A backend sets it for a stopped session
	// whose state may already be there.
	To    move.Backend
	Epoch move.Epoch    // epoch of the owner
	Age   time.Duration // since the latest packet; sent in whole seconds
	Gone  bool          // the flow has ended
	Quiet bool          // in a backend's report: the session has moved there and has sent nothing yet
}

// The body of a flows frame begins with four bytes: 1 (the version), 1 for the last frame of a
// list, and zeros. Records of 32 bytes follow: 0 client, 16 port, 18 service, 20 owner, 22 to, 24
// epoch, 28 age in seconds, 30 flags (1 gone, 2 quiet), 31 zero.
const (
	flowsVersion = 1
	flowsHead    = 4
	recordSize   = 32
	recordGone   = 1
	recordQuiet  = 2
	maxBackend   = 1<<10 - 1
)

// maxFlows is the largest number of records in a frame.
const maxFlows = 16 << 10

// TellFlows sends records, in as many frames as necessary. last marks the list as complete.
func (c *Conn) TellFlows(records []FlowRecord, last bool) error {
	for more := true; more; {
		part := records[:min(len(records), maxFlows)]
		records = records[len(part):]
		more = len(records) > 0
		if err := c.write(typeFlows, nil, AppendFlows(nil, part, last && !more)); err != nil {
			return err
		}
	}
	return nil
}

// AppendFlows appends the body of a flows frame.
func AppendFlows(b []byte, records []FlowRecord, last bool) []byte {
	b = append(b, flowsVersion, 0, 0, 0)
	if last {
		b[len(b)-3] = 1
	}
	for _, r := range records {
		client := r.Flow.Client.Addr().As16()
		b = append(b, client[:]...)
		b = binary.BigEndian.AppendUint16(b, r.Flow.Client.Port())
		b = binary.BigEndian.AppendUint16(b, r.Flow.Service)
		b = binary.BigEndian.AppendUint16(b, uint16(r.Owner))
		b = binary.BigEndian.AppendUint16(b, uint16(r.To))
		b = binary.BigEndian.AppendUint32(b, uint32(r.Epoch))
		b = binary.BigEndian.AppendUint16(b, uint16(min(r.Age/time.Second, 1<<16-1)))
		flags := byte(0)
		if r.Gone {
			flags |= recordGone
		}
		if r.Quiet {
			flags |= recordQuiet
		}
		b = append(b, flags, 0)
	}
	return b
}

// ParseFlows parses the body of a flows frame.
func ParseFlows(b []byte) (out []FlowRecord, last bool, err error) {
	if len(b) < flowsHead || b[0] != flowsVersion || (len(b)-flowsHead)%recordSize != 0 {
		return nil, false, fmt.Errorf("%w: flows of %d bytes in an unknown form: update the older weir", ErrFormat, len(b))
	}
	last = b[1] == 1
	for b = b[flowsHead:]; len(b) > 0; b = b[recordSize:] {
		r := FlowRecord{
			Flow:  Flow{binary.BigEndian.Uint16(b[18:]), netip.AddrPortFrom(netip.AddrFrom16([16]byte(b)).Unmap(), binary.BigEndian.Uint16(b[16:]))},
			Owner: move.Backend(binary.BigEndian.Uint16(b[20:])), To: move.Backend(binary.BigEndian.Uint16(b[22:])),
			Epoch: move.Epoch(binary.BigEndian.Uint32(b[24:])), Age: time.Duration(binary.BigEndian.Uint16(b[28:])) * time.Second,
			Gone: b[30]&recordGone != 0, Quiet: b[30]&recordQuiet != 0}
		if r.Owner > maxBackend || r.To > maxBackend {
			return nil, false, fmt.Errorf("%w: a flow of backend %d, %d: the highest is %d", ErrFormat, r.Owner, r.To, maxBackend)
		}
		out = append(out, r)
	}
	return out, last, nil
}
