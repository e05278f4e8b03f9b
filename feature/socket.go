// SPDX-License-Identifier: Apache-2.0

package feature

import (
	"context"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
)

// SocketServer is implemented by features that answer processes of the host at a Unix socket of their own, in weir serve.
type SocketServer interface {
	// SocketFlag describes the flag of weir serve with the socket's path.
	SocketFlag() SocketFlag
	// Socket prepares the answers of one weir serve.
	Socket(r *kernel.Root, log *slog.Logger, members Members) Socket
}

// SocketFlag is a flag with the path of a Unix socket.
type SocketFlag struct {
	Name    string // "register-socket"
	Usage   string // "socket for …"
	Default string // path
}

// Socket answers at a Unix socket.
type Socket interface {
	// Serve answers at the path until ctx is done.
	Serve(ctx context.Context, path string) error
	// Collector returns metrics; nil: there are none.
	Collector() prometheus.Collector
}

// FileSocket is implemented by a [Socket] that can go by the configuration file itself, without pins. weir serve that runs nothing else
// (--only) needs no right then.
type FileSocket interface {
	Socket
	// Configure has the socket go by a file. The first call is before Serve.
	Configure(d *Document) error
}

// Expectant is implemented by a [Socket] that goes by the pins and has clients before weir serve has applied its file.
type Expectant interface {
	Socket
	// Expect gives the file that will be applied. It is called before Serve. Pins that exist go before the file.
	Expect(d *Document)
}

// Members lists the members that weir.yaml names for the slots of a service. The error wraps [kernel.ErrNotExist] if there is no
// such service.
type Members func(service string) ([]service.Member, error)

// MemberLister is implemented by the feature that knows the members of services.
type MemberLister interface {
	Members(r *kernel.Root, service string) ([]service.Member, error)
}
