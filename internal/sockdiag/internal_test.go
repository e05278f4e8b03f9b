// SPDX-License-Identifier: Apache-2.0

package sockdiag

import (
	"encoding/binary"
	"errors"
	"strings"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

func TestWireSizes(t *testing.T) {
	if n := binary.Size(diagRequest{}); n != 56 {
		t.Errorf("struct inet_diag_req_v2 takes %d bytes, want 56", n)
	}
	if diagMessageLen != 72 {
		t.Errorf("struct inet_diag_msg takes %d bytes, want 72", diagMessageLen)
	}
}

func TestConsistent(t *testing.T) {
	broken := []netlink.Message{{}, {Header: netlink.Header{Flags: netlink.Multi | netlink.DumpInterrupted}}}
	for _, c := range []struct {
		breaks, calls int
		want          error
	}{{0, 1, nil}, {dumpAttempts - 1, dumpAttempts, nil}, {dumpAttempts, dumpAttempts, errInterrupted}} {
		calls := 0
		msgs, err := consistent(func() ([]netlink.Message, error) {
			if calls++; calls <= c.breaks {
				return broken, nil
			}
			return make([]netlink.Message, 3), nil
		})
		if !errors.Is(err, c.want) || calls != c.calls || c.want == nil && len(msgs) != 3 {
			t.Errorf("%d interrupted: %d messages, %v after %d calls; want %v after %d", c.breaks, len(msgs), err, calls, c.want, c.calls)
		}
	}
}

// TestNoHandler checks the kernel's answer for a protocol without a handler.
func TestNoHandler(t *testing.T) {
	const unassigned = 250
	_, err := dump(Query{Proto: unix.IPPROTO_UDP}, unassigned)
	if !errors.Is(err, errNoDiag) {
		t.Errorf("protocol %d: %v, want ErrNoDiag", unassigned, err)
	}
	if err := explainDump(unix.ENOENT, unix.IPPROTO_UDP); !strings.Contains(err.Error(), "modprobe udp_diag") {
		t.Errorf("%v; want the module's name", err)
	}
}

// FuzzParse tries attributes of various lengths and invalid ones.
func FuzzParse(f *testing.F) {
	good, err := binary.Append(nil, binary.NativeEndian, diagMessage{Family: unix.AF_INET6, State: Listen})
	if err != nil {
		f.Fatal(err)
	}
	attrs, err := netlink.MarshalAttributes([]netlink.Attribute{
		{Type: attrSKMemInfo, Data: make([]byte, 36)}, {Type: attrSKV6Only, Data: []byte{1}}, {Type: attrInfo, Data: make([]byte, 200)},
	})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add(append(good, attrs...))
	f.Add(append(good, 8, 0, attrSKV6Only, 0, 1, 2, 3, 4)) // more than one byte
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, data []byte) {
		s, err := parse(data, Query{Proto: unix.IPPROTO_TCP, Info: true})
		if err == nil && (!s.Local.IsValid() || !s.Remote.IsValid()) {
			t.Errorf("no addresses in %+v", s)
		}
	})
}
