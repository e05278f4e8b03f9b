// SPDX-License-Identifier: Apache-2.0

package packetbuf

import (
	"encoding/binary"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// TestWait checks that packets of a flow wait in order, packets of other flows pass at once, and
// open is called first or last.
func TestWait(t *testing.T) {
	nstest.NeedRoot(t)
	for name, after := range map[string]bool{"then open": false, "open first": true} {
		t.Run(name, func(t *testing.T) {
			err := nstest.NewNetns(t).Do(func() error {
				d, err := New("park", false, func(_, to netip.AddrPort, proto uint8) (uint16, bool) { return to.Port(), proto == unix.IPPROTO_UDP })
				if err != nil {
					return err
				}
				defer d.Close()
				l, err := netlink.LinkByName("park")
				if err != nil {
					return err
				}
				if err := netlink.AddrAdd(l, &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(10, 9, 0, 1), Mask: net.CIDRMask(24, 32)}}); err != nil {
					return err
				}
				back, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(swap(unix.ETH_P_IP)))
				if err != nil {
					return err
				}
				defer unix.Close(back)
				if err := unix.Bind(back, &unix.SockaddrLinklayer{Protocol: swap(unix.ETH_P_IP), Ifindex: d.Ifindex}); err != nil {
					return err
				}
				d.Expect(1)
				for _, p := range []struct {
					port int
					word string
				}{{1, "a"}, {2, "b"}, {1, "c"}} {
					c, err := net.Dial("udp", (&net.UDPAddr{IP: net.IPv4(10, 9, 0, 5), Port: p.port}).String())
					if err != nil {
						return err
					}
					_, err = c.Write([]byte(p.word))
					c.Close()
					if err != nil {
						return err
					}
				}
				if err := d.Collect(); err != nil {
					return err
				}
				if got := came(t, back); got != "b" {
					t.Errorf("%q went on: want b alone", got)
				}
				opened := ""
				open := func() error { opened = came(t, back); return nil }
				if after {
					err = d.FlushAfter(1, open)
				} else {
					var n int
					if n, err = d.Flush(1, open); n != 2 {
						t.Errorf("%d have waited", n)
					}
				}
				all := opened + came(t, back)
				if all != "ac" || after && opened != "" || !after && opened != "ac" {
					t.Errorf("%q went on, %q before it was open", all, opened)
				}
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
		})
	}
}

// came returns the last byte of each packet received from the device since the previous call.
func came(t *testing.T, fd int) (all string) {
	t.Helper()
	b := make([]byte, 2048)
	nstest.Steadily(t, 50*time.Millisecond, func() error {
		for {
			n, from, err := unix.Recvfrom(fd, b, unix.MSG_DONTWAIT)
			if err != nil {
				return nil // none now
			}
			if ll, ok := from.(*unix.SockaddrLinklayer); ok && ll.Pkttype != unix.PACKET_OUTGOING {
				all += string(b[n-1 : n])
			}
		}
	})
	return all
}

// swap converts a number to network byte order.
func swap(v uint16) uint16 { return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, v)) }
