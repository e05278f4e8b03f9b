// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"bufio"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"

	"github.com/weir-project/weir/feature/steer/bindings"
	"golang.org/x/sys/unix"
)

// Bound and unbound addresses are in 11.0.0.0 to 126.255.255.255. Services have their own sockets in
// 198.18.0.0/15, unused by other networks.
const (
	firstAddress = 11 << 24
	addresses    = 116 << 24
	boundPort    = 80
)

func serviceAddr(n uint32) netip.Addr {
	return netip.AddrFrom4([4]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)})
}

// Services are numbered; every second one uses TCP.
func serviceProto(service int) bindings.Proto {
	if service%2 == 1 {
		return unix.IPPROTO_TCP
	}
	return unix.IPPROTO_UDP
}

func serviceName(service int) string { return fmt.Sprintf("svc-%05d", service) }

// set holds bindings of random hosts, all different. Its first n bindings are a set, too.
type set struct {
	hosts    []uint32
	at       map[uint32]int
	services int
}

func drawSet(n, services int, r *rand.Rand) *set {
	s := &set{make([]uint32, 0, n), make(map[uint32]int, n), services}
	for len(s.hosts) < n {
		h := firstAddress + r.Uint32N(addresses)
		if _, taken := s.at[h]; !taken {
			s.at[h] = len(s.hosts)
			s.hosts = append(s.hosts, h)
		}
	}
	return s
}

// unbound draws a host outside the set.
func (s *set) unbound(r *rand.Rand) uint32 {
	for {
		h := firstAddress + r.Uint32N(addresses)
		if _, bound := s.at[h]; !bound {
			return h
		}
	}
}

func (s *set) service(i int) int { return i % s.services }

func (s *set) binding(i int) bindings.Binding {
	service := s.service(i)
	return bindings.Binding{Service: serviceName(service), Prefix: netip.PrefixFrom(serviceAddr(s.hosts[i]), 32), Port: boundPort, Proto: serviceProto(service)}
}

func (s *set) bindings(n int) []bindings.Binding {
	all := make([]bindings.Binding, n)
	for i := range all {
		all[i] = s.binding(i)
	}
	return all
}

// writeFile writes bindings in the format of steer.WriteBindings. It avoids the slow encoder for a million.
func writeFile(path string, all []bindings.Binding) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	w := bufio.NewWriterSize(f, 1<<20)
	fmt.Fprint(w, "{\n  \"bindings\": [")
	for i, b := range all {
		comma := ","
		if i == 0 {
			comma = ""
		}
		fmt.Fprintf(w, "%s\n    {\n      \"label\": %q,\n      \"prefix\": %q,\n      \"port\": %d,\n      \"protocol\": %q\n    }", comma, b.Service, b.Prefix, b.Port, b.Proto)
	}
	fmt.Fprint(w, "\n  ]\n}\n")
	if err := w.Flush(); err != nil {
		return err
	}
	return f.Close()
}
