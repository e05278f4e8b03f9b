// SPDX-License-Identifier: Apache-2.0

package feature

import (
	"context"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
)

// SocketServer is implemented by features with a Unix socket of their own for the host's processes, in weir serve.
type SocketServer interface {
	// SocketFlag describes weir serve's flag with the socket's path.
	SocketFlag() SocketFlag
	// Socket prepares the socket's server for one weir serve.
	Socket(r *kernel.Root, log *slog.Logger, members Members) Socket
}

// SocketFlag is a flag with the path of a Unix socket.
type SocketFlag struct {
	Name    string // "register-socket"
	Usage   string // "socket for …"
	Default string // default path
}

// Socket serves a Unix socket.
type Socket interface {
	// Serve serves the socket at path until ctx is done.
	Serve(ctx context.Context, path string) error
	// Collector returns metrics, or nil.
	Collector() prometheus.Collector
}

// FileSocket is implemented by a [Socket] that can use the configuration file without pins. A weir serve with only such
// features (--only) needs no rights.
type FileSocket interface {
	Socket
	// Configure makes the socket use a file. The first call precedes Serve.
	Configure(d *Document) error
}

// Expectant is implemented by a [Socket] that uses the pins and has clients before weir serve has applied its file.
type Expectant interface {
	Socket
	// Expect passes the file to be applied. It is called before Serve. Existing pins override the file.
	Expect(d *Document)
}

// Members lists the members named in weir.yaml for the slots of a service. The error wraps [kernel.ErrNotExist] for an
// unknown service.
type Members func(service string) ([]service.Member, error)

// MemberLister is implemented by the feature that knows the members of services.
type MemberLister interface {
	Members(r *kernel.Root, service string) ([]service.Member, error)
}
