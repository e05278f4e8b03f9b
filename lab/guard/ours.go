// SPDX-License-Identifier: Apache-2.0

package guards

import (
	"net"

	client "github.com/weir-project/weir/clients/go/guard"
	"github.com/weir-project/weir/feature/guard"
	"github.com/weir-project/weir/feature/guard/guardtest"
	"github.com/weir-project/weir/feature/guard/scenario"
)

// weir is weir's own side: the filter of a socket, attached by the library.
var weir = side{
	limiter: func(limit uint64, ipv6 bool, seed uint64) (limiter, error) {
		// With seed 0 the guard draws its secret, and results are not repeatable.
		g, err := guardtest.New(guardtest.Options{Limit: limit, IPv6: ipv6, Hook: guard.Socket, Seed: seed + 1, Batch: true})
		return product{g}, err
	},
	attach: func(conn *net.UDPConn, limit uint64) (func(), error) {
		g, err := client.Attach(conn, client.Limit(limit))
		if err != nil {
			return nil, err
		}
		return g.Close, nil
	},
}

type product struct{ *guardtest.Guard }

func (g product) One(p *scenario.Packet) (bool, error) { return g.Passes(p.At, g.Frame(p)) }

func (g product) Accounts(at uint64) (passed, spent uint64) {
	return g.Counts(at).Passed, uint64(g.Spent(at))
}

func (g product) Close() error {
	g.Guard.Close()
	return nil
}
