// SPDX-License-Identifier: Apache-2.0

package control

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

const (
	requestTime = 5 * time.Second
	maxAnswer   = 16 << 20 // bytes
)

// ErrNoAnswer reports an agent that does not answer.
var ErrNoAnswer = errors.New("no answer")

// Request sends a request to an agent and returns the answer. An answer other than 200 is an error
// with its text. Without an answer the error wraps ErrNoAnswer.
func Request(ctx context.Context, name, method, path string) ([]byte, error) {
	c := Client(name)
	c.Timeout = requestTime
	req, err := http.NewRequestWithContext(ctx, method, "http://agent"+path, nil)
	if err != nil {
		return nil, err
	}
	resp, err := c.Do(req)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoAnswer, err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err == nil && resp.StatusCode != http.StatusOK {
		err = errors.New(strings.TrimSpace(string(body)))
	}
	return body, err
}
