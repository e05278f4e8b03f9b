// SPDX-License-Identifier: Apache-2.0

package guards

import (
	"net"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/guard/scenario"
	"github.com/weir-project/weir/lab/guard/rakelimit"
)

// limiter is a program that decides, with the scenario's clock.
type limiter interface {
	scenario.Limiter
	// One decides a packet by a run of Program of its own.
	One(p *scenario.Packet) (bool, error)
	// Frame is the packet as Program is given it, valid until the next call.
	Frame(p *scenario.Packet) []byte
	Program() *ebpf.Program
	// BatchProgram is what Decide runs, once for 4,096 packets.
	BatchProgram() *ebpf.Program
	Close() error
}

// side is one of the two that are compared.
type side struct {
	name string // begins metrics' names, with "_" behind it; "" for weir
	// limiter makes one that has seen nothing; seed makes what it draws repeatable.
	limiter func(limit uint64, ipv6 bool, seed uint64) (limiter, error)
	// attach limits a real socket, in packets per second, until the function it returns is called.
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
