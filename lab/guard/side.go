// SPDX-License-Identifier: Apache-2.0

package guards

import (
	"net"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/guard/scenario"
	"github.com/weir-project/weir/lab/guard/rakelimit"
)

// limiter is a deciding program with the scenario's clock.
type limiter interface {
	scenario.Limiter
	// One decides a packet by its own run of Program.
	One(p *scenario.Packet) (bool, error)
	// Frame returns the packet as input of Program, valid until the next call.
	Frame(p *scenario.Packet) []byte
	Program() *ebpf.Program
	// BatchProgram returns the program of Decide, run once for 4,096 packets.
	BatchProgram() *ebpf.Program
	Close() error
}

// side is one of the compared limiters.
type side struct {
	name string // prefix of the metrics' names, followed by "_"; "" for weir
	// limiter creates a limiter without history; seed makes its random draws repeatable.
	limiter func(limit uint64, ipv6 bool, seed uint64) (limiter, error)
	// attach limits a real socket, in packets per second, until the returned function is called.
	attach func(conn *net.UDPConn, limit uint64) (func(), error)
}

// theirs is the original algorithm.
var theirs = side{
	name:    "rakelimit_",
	limiter: newRake,
	attach: func(conn *net.UDPConn, limit uint64) (func(), error) {
		return func() {}, rakelimit.Attach(conn, uint32(limit))
	},
}

type rake struct{ *rakelimit.Limiter }

func newRake(limit uint64, ipv6 bool, seed uint64) (limiter, error) {
	l, err := rakelimit.New(rakelimit.Options{Limit: uint32(limit), IPv6: ipv6, Seed: seed})
	return rake{l}, err
}

func (r rake) One(p *scenario.Packet) (bool, error) {
	passed, _, err := r.Limiter.One(p)
	return passed, err
}
