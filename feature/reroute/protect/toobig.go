// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// A link farther along a repair may have a smaller MTU than the repair's first one. Its
// router's Packet Too Big (RFC 4443 section 3.2) goes to the source of the outer header,
// which is this router: the sender of the packet hears nothing and waits in vain, as with the
// kernel's own encap seg6. It is told in the log, with the repair's key that mends it.

const (
	icmp6TooBig    = 2
	icmp6HeaderLen = 8
	ip6HeaderLen   = 40
	icmp6Filter    = 1 // ICMP6_FILTER of linux/icmpv6.h
	leastMTU6      = 1280
)

// tooBig is such a message.
type tooBig struct {
	mtu      uint32
	src, dst netip.Addr // of the packet that was too big
}

// parseTooBig reads an ICMPv6 message; what is quoted must be a packet that carries another
// one or a routing header.
func parseTooBig(b []byte) (m tooBig, ok bool) {
	if len(b) < icmp6HeaderLen+ip6HeaderLen || b[0] != icmp6TooBig {
		return m, false
	}
	quoted := b[icmp6HeaderLen:]
	switch next := quoted[6]; {
	case quoted[0]>>4 != 6, next != unix.IPPROTO_ROUTING && next != unix.IPPROTO_IPV6 && next != unix.IPPROTO_IPIP:
		return m, false
	}
	m.mtu = binary.BigEndian.Uint32(b[4:])
	m.src, m.dst = netip.AddrFrom16([16]byte(quoted[8:24])), netip.AddrFrom16([16]byte(quoted[24:40]))
	return m, m.mtu >= leastMTU6 && m.mtu < 1<<16
}

// hearTooBig tells of each message about a repair of the namespace, until the returned
// function is called. Anybody can forge one: it changes nothing, and the log is bounded.
func (w *watcher) hearTooBig() (stop func(), err error) {
	var f *os.File
	err = w.ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_ICMPV6)
		if err != nil {
			return err
		}
		pass := make([]byte, 32) // a bit for each type, set: not passed
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
	paths := slices.Clone(w.Paths)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		b := make([]byte, 2048)
		for {
			n, err := f.Read(b)
			if errors.Is(err, os.ErrClosed) {
				return
			} else if err != nil {
				time.Sleep(lookEvery) // an error that waited at the socket
				continue
			}
			if m, ok := parseTooBig(b[:n]); ok {
				tellTooBig(w.log, paths, m)
			}
		}
	}()
	return func() { f.Close(); <-ended }, nil
}

// tellTooBig logs a message that is about a repair.
func tellTooBig(log interface{ Warn(string, ...any) }, paths []published, m tooBig) {
	for _, p := range paths {
		for _, r := range p.Repairs {
			ours := !r.Source.IsValid() || r.Source == m.src
			if ours && slices.Contains(append(slices.Clone(r.Segments), r.Segments4...), m.dst) && (r.MTU == 0 || r.MTU > int(m.mtu)) {
				log.Warn("rerouted packets are too big for a link on the way, and lost", "name", p.Name, "interface", p.Device, "segment", m.dst, "mtu", m.mtu,
					"remedy", "give the repair this mtu, or that link a larger one")
				return
			}
		}
	}
}
