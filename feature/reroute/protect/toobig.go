// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// A link farther along a repair may have a smaller MTU than the first one. Its router sends Packet Too Big (RFC 4443
// section 3.2) to the source of the outer header, this router. The packet's sender hears nothing and waits in vain,
// as with the kernel's own encap seg6. So weir learns the repair's size from the message (learnt.go), and the log
// names the key for a permanent setting.

// LeastMTU is the packet size every link carries, in bytes (RFC 8200 section 5). Smaller sizes are never learnt.
const LeastMTU = 1280

const (
	icmp6TooBig    = 2
	icmp6HeaderLen = 8
	ip6HeaderLen   = 40
	icmp6Filter    = 1 // ICMP6_FILTER of linux/icmpv6.h

	tooBigEvery = 10 * time.Millisecond // least time between two handled messages, to bound the cost
)

// tooBig is a received Packet Too Big.
type tooBig struct {
	mtu    uint32
	length uint32 // of the quoted packet
	quoted []byte // its beginning, with at least the IPv6 header
}

// parseTooBig parses an ICMPv6 message. The quoted packet must carry another packet or a routing header.
func parseTooBig(b []byte) (m tooBig, ok bool) {
	if len(b) < icmp6HeaderLen+ip6HeaderLen || b[0] != icmp6TooBig {
		return m, false
	}
	quoted := b[icmp6HeaderLen:]
	switch next := quoted[6]; {
	case quoted[0]>>4 != 6, next != unix.IPPROTO_ROUTING && next != unix.IPPROTO_IPV6 && next != unix.IPPROTO_IPIP:
		return m, false
	}
	m.mtu, m.length, m.quoted = binary.BigEndian.Uint32(b[4:]), quotedLength(quoted), bytes.Clone(quoted)
	return m, m.mtu >= LeastMTU && m.mtu < 1<<16
}

// hearTooBig passes Packet Too Big messages of the namespace to w.tooBig until stop is called. Messages beyond the
// handled rate are dropped, because routers repeat them.
func (w *watcher) hearTooBig() (stop func(), err error) {
	var f *os.File
	err = w.ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_ICMPV6)
		if err != nil {
			return err
		}
		pass := make([]byte, 32) // one bit per type; a set bit blocks
		for i := range pass {
			pass[i] = 0xff
		}
		binary.NativeEndian.PutUint32(pass, ^uint32(1<<icmp6TooBig))
		if err := unix.SetsockoptString(fd, unix.IPPROTO_ICMPV6, icmp6Filter, string(pass)); err != nil {
			unix.Close(fd)
			return err
		}
		f = os.NewFile(uintptr(fd), "ICMPv6")
		return nil
	})
	if err != nil {
		return nil, err
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		b := make([]byte, 2048)
		for {
			n, err := f.Read(b)
			if errors.Is(err, os.ErrClosed) {
				return
			} else if err != nil {
				time.Sleep(pollInterval) // a pending error of the socket
				continue
			}
			if m, ok := parseTooBig(b[:n]); ok && w.concerns(m) {
				select {
				case w.tooBig <- m:
				default:
				}
				time.Sleep(tooBigEvery)
			}
		}
	}()
	return func() { f.Close(); <-ended }, nil
}
