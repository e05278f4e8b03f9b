// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
)

// NFT loads a ruleset into a namespace of the run, given by name. The error includes the output of nft.
func (e *Env) NFT(ctx context.Context, namespace, ruleset string) error {
	file := filepath.Join(e.Dir, namespace+".nft")
	if err := os.WriteFile(file, []byte(ruleset), 0o644); err != nil {
		return err
	}
	var says bytes.Buffer
	p, err := e.Start(Command{Namespace: namespace, Path: "nft", Args: []string{"-f", file}, Output: &says})
	if err != nil {
		return err
	}
	select {
	case <-p.Done():
	case <-ctx.Done():
		return ctx.Err()
	}
	if err := p.Err(); err != nil {
		return fmt.Errorf("nft -f %s: %w: %.300s", file, err, says.String())
	}
	return nil
}
