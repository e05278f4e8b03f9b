// SPDX-License-Identifier: Apache-2.0

package reroutestress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"

	"github.com/weir-project/weir/feature/reroute/bfd/peers"
	"github.com/weir-project/weir/feature/reroute/liveness"
	"github.com/weir-project/weir/kernel"
)

// serveArg makes the lab's binary supervise liveness and BFD, like weir serve; see Play.
const serveArg = "__reroutestress-serve"

// Play turns a process started by the experiment into the supervisor of liveness. main and TestMain call it
// first. In any other process it returns.
func Play() {
	if len(os.Args) != 3 || os.Args[1] != serveArg {
		return
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	root := kernel.OpenRoot(os.Args[2])
	ended := make(chan error)
	go func() { ended <- liveness.Run(context.Background(), root, log) }()
	go func() { ended <- peers.Run(context.Background(), root, log) }()
	if err := errors.Join(<-ended, <-ended); err != nil {
		fmt.Fprintln(os.Stderr, "supervise liveness:", err)
		os.Exit(1)
	}
	os.Exit(0)
}
